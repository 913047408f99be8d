#include "src/ops/int8_weight.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::ops {
namespace {

using kernels::cpu::Int8RowInputs;
using kernels::cpu::kInt8Group;

// About this many elements of a weight are widened at a time.
constexpr int64_t kWidenedElements = 16 << 20;

// Widens inputs [begin, end) of every row of a weight of 8 bits to f32. Returns
// [O, end - begin]. `begin` is the first input of a group.
at::Tensor WidenWithKernel(const at::Tensor& weight, int64_t begin,
                           int64_t end) {
  const int64_t rows = weight.size(0), count = end - begin;
  const int64_t inputs = Int8RowInputs(weight.size(1));
  at::Tensor wide_OI = at::empty({rows, count}, at::kFloat);
  const int8_t* from = weight.const_data_ptr<int8_t>();
  float* to = wide_OI.mutable_data_ptr<float>();
  at::parallel_for(0, rows, RowGrain(count), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      kernels::cpu::Kernels().widen_int8_row(
          from + row * weight.stride(0), inputs, begin, end, to + row * count);
    }
  });
  return wide_OI;
}

// Does what WidenWithKernel does, on any device and in any dtype.
at::Tensor WidenWithAten(const at::Tensor& weight, int64_t begin, int64_t end,
                         at::ScalarType dtype) {
  const int64_t inputs = Int8RowInputs(weight.size(1));
  const int64_t first = begin / kInt8Group;
  const int64_t last = (end + kInt8Group - 1) / kInt8Group;
  const at::ScalarType exact = dtype == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor scales_OG = weight.narrow(1, inputs, weight.size(1) - inputs)
                                   .contiguous()
                                   .view(at::kBFloat16)
                                   .narrow(1, first, last - first)
                                   .to(exact);
  return weight.narrow(1, begin, end - begin)
      .to(exact)
      .mul_(
          scales_OG.repeat_interleave(kInt8Group, 1).narrow(1, 0, end - begin))
      .to(dtype);
}

at::Tensor Widen(const at::Tensor& weight, int64_t begin, int64_t end,
                 at::ScalarType dtype) {
  if constexpr (kHasCudaKernels) {
    if (cuda::TakesWidenInt8Rows(weight, dtype)) {
      return cuda::WidenInt8Rows(weight, begin, end, dtype);
    }
  }
  return weight.is_cpu() && dtype == at::kFloat && weight.stride(1) == 1
             ? WidenWithKernel(weight, begin, end)
             : WidenWithAten(weight, begin, end, dtype);
}

}  // namespace

at::Tensor Int8Memory(const at::Tensor& weight) {
  return weight.as_strided({weight.size(0), weight.stride(0)},
                           {weight.stride(0), 1});
}

std::optional<int64_t> QuantizeRows(const at::Tensor& rows_OI,
                                    const at::Tensor& stored) {
  const at::Tensor wide_OI = rows_OI.to(at::kFloat).contiguous();
  const int64_t rows = wide_OI.size(0), inputs = wide_OI.size(1);
  TORCH_CHECK(stored.dim() == 2 && stored.size(0) == rows &&
                  stored.size(1) == Int8RowBytes(inputs) && IsInt8(stored),
              "rows ", wide_OI.sizes(), " do not fit 8-bit rows ",
              stored.sizes());
  // A device gets whole rows, because a copy of their parts would be slow.
  const at::Tensor memory = stored.is_cpu() ? at::Tensor() : Int8Memory(stored);
  const at::Tensor quantized =
      stored.is_cpu() ? stored : at::empty(memory.sizes(), at::kChar);
  const int64_t stride = quantized.stride(0);
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> refused = kNone;
  const float* from = wide_OI.const_data_ptr<float>();
  auto* to = quantized.mutable_data_ptr<int8_t>();
  at::parallel_for(0, rows, RowGrain(inputs), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      if (kernels::cpu::Kernels().quantize_row(from + row * inputs, inputs,
                                               to + row * stride)) {
        continue;
      }
      int64_t least = refused;
      while (row < least && !refused.compare_exchange_weak(least, row)) {
      }
      return;
    }
  });
  if (refused != kNone) return refused.load();
  if (memory.defined()) memory.copy_(quantized);
  return std::nullopt;
}

at::Tensor Widened(const at::Tensor& weight, at::ScalarType dtype) {
  if (!IsInt8(weight)) return weight.to(dtype);
  return Widen(weight, 0, Int8RowInputs(weight.size(1)), dtype);
}

at::Tensor WidenedRows(const at::Tensor& weight, const at::Tensor& index_T,
                       at::ScalarType dtype) {
  if (!IsInt8(weight)) return weight.index_select(0, index_T).to(dtype);
  // The selected rows are as far apart as those of the weight.
  return Widened(
      Int8Memory(weight).index_select(0, index_T).narrow(1, 0, weight.size(1)),
      dtype);
}

bool TakesInt8FewRows(const at::Tensor& x_MI, const at::Tensor& weight) {
  if constexpr (kHasCudaKernels) return cuda::TakesInt8FewRows(x_MI, weight);
  return false;
}

void Int8FewRows(const at::Tensor& x_MI, const at::Tensor& weight,
                 const at::Tensor& bias_O, at::Tensor y_MO) {
  if constexpr (kHasCudaKernels) {
    cuda::Int8FewRows(x_MI, weight, bias_O, y_MO);
  } else {
    TORCH_CHECK(false, "no CUDA kernels in this build");
  }
}

at::Tensor MatMulOfInt8(const at::Tensor& a_MK, const at::Tensor& int8_KN,
                        const at::Tensor& bias_N) {
  const bool is_transposed = int8_KN.stride(0) == 1;
  const at::Tensor weight = is_transposed ? int8_KN.t() : int8_KN;
  const int64_t rows = weight.size(0);
  const int64_t inputs = Int8RowInputs(weight.size(1));
  at::Tensor y_MN =
      at::empty({a_MK.size(0), is_transposed ? rows : inputs}, a_MK.options());
  if (is_transposed && TakesInt8FewRows(a_MK, weight)) {
    Int8FewRows(a_MK, weight, bias_N, y_MN);
    return y_MN;
  }
  const at::ScalarType dtype = a_MK.scalar_type();
  const int64_t length = std::max<int64_t>(1, is_transposed ? inputs : rows);
  // Parts of rows are widened in whole groups.
  const int64_t unit = is_transposed ? 1 : kInt8Group;
  const int64_t step =
      std::max<int64_t>(1, kWidenedElements / length / unit) * unit;
  for (int64_t n = 0; n < y_MN.size(1); n += step) {
    const int64_t count = std::min(step, y_MN.size(1) - n);
    at::Tensor part = y_MN.narrow(1, n, count);
    at::mm_out(part, a_MK,
               is_transposed ? Widened(weight.narrow(0, n, count), dtype).t()
                             : Widen(weight, n, n + count, dtype));
  }
  if (bias_N.defined()) y_MN.add_(bias_N);
  return y_MN;
}

}  // namespace weft::ops
