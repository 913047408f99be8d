#include "src/ops/matmul.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "kernels/cpu/kernels.h"
#include "src/ops/bf16_product.h"
#include "src/ops/column_product.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/few_rows.h"
#include "src/ops/int8_weight.h"
#include "src/ops/panel_matmul.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

// A skinny product of up to kSkinnyRows rows reads a weight of bf16 or 8 bits
// once. Up to this many such products cost less than widening the weight.
constexpr int64_t kMaxNarrowPasses = 4;

// The only operator through which LibTorch exposes oneDNN's dense product. It
// takes x [M, K], weight [N, K] of any strides, a bias, and a function to apply
// to the product, which is "none" here.
using LinearPointwise = at::Tensor(const at::Tensor&, const at::Tensor&,
                                   const std::optional<at::Tensor>&,
                                   std::string_view,
                                   c10::List<std::optional<at::Scalar>>,
                                   std::optional<std::string_view>);

const char* const kOperator = "mkldnn::_linear_pointwise";

at::Tensor OneDnnMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                        const std::optional<at::Tensor>& bias_N) {
  static const auto linear = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow(kOperator, "")
                                 .typed<LinearPointwise>();
  return linear.call(a_MK.contiguous(), b_KN.t(), bias_N, "none",
                     c10::List<std::optional<at::Scalar>>(), std::nullopt);
}

// Returns whether oneDNN is present and worth using. In measurements it was
// faster only on AMD processors. Some builds of LibTorch lack the operator.
bool HasOneDnn() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") &&
         c10::Dispatcher::singleton().findSchema({kOperator, ""}).has_value();
#else
  return false;
#endif
}

bool PrefersOneDnn(const at::Tensor& a_MK) {
  static const bool has_one_dnn = HasOneDnn();
  // oneDNN gains nothing for an empty product.
  return has_one_dnn && HasCpuKernel(a_MK) && a_MK.numel() > 0;
}

// Returns whether skinny products take a and this weight [O, I] or its
// transposed view: a is f32 on a CPU, contiguous, not empty and has few rows,
// and the weight is f32, bf16 or in 8 bits.
bool HasSkinnyRows(const at::Tensor& a_MK, const at::Tensor& weight) {
  const bool is_narrow =
      weight.scalar_type() == at::kBFloat16 || IsInt8(weight);
  const int64_t most =
      kernels::cpu::kSkinnyRows * (is_narrow ? kMaxNarrowPasses : 1);
  return HasCpuKernel(a_MK) && a_MK.numel() > 0 && a_MK.size(0) <= most &&
         a_MK.is_contiguous() &&
         (is_narrow || weight.scalar_type() == at::kFloat);
}

bool IsSkinny(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return (b_KN.stride(0) == 1 || b_KN.size(0) == 1) &&
         HasSkinnyRows(a_MK, b_KN);
}

void RunPasses(kernels::cpu::SkinnyProduct item, const at::Tensor& weight) {
  const int64_t num_rows = item.num_rows;
  for (int64_t row = 0; row < num_rows; row += kernels::cpu::kSkinnyRows) {
    item.num_rows = std::min(kernels::cpu::kSkinnyRows, num_rows - row);
    RunSkinny(item, weight, /*first_row=*/0);
    item.x_BI += item.num_rows * item.x_stride;
    item.y_BO += item.num_rows * item.y_stride;
  }
}

// Returns a W^T + bias_N. `weight` is W [O, I] or its transposed view, and
// `stride` is the distance between rows of W.
at::Tensor SkinnyMatMul(const at::Tensor& a_MK, const at::Tensor& weight,
                        int64_t outputs, int64_t stride,
                        const at::Tensor& bias_N) {
  at::Tensor y_MN = at::empty({a_MK.size(0), outputs}, a_MK.options());
  at::Tensor bias;
  if (bias_N.defined()) bias = bias_N.to(at::kFloat).contiguous();
  const kernels::cpu::SkinnyProduct whole{
      .x_BI = a_MK.const_data_ptr<float>(),
      .x_stride = a_MK.size(1),
      .num_rows = a_MK.size(0),
      .num_inputs = a_MK.size(1),
      .weight_stride = stride,
      .bias_O = bias.defined() ? bias.const_data_ptr<float>() : nullptr,
      .y_BO = y_MN.mutable_data_ptr<float>(),
      .y_stride = outputs};
  const SharedRows rows = RowsOf(weight, outputs, stride);
  ParallelForRows(rows, [&](int64_t begin, int64_t end) {
    kernels::cpu::SkinnyProduct part = whole;
    part.begin = begin * rows.group_rows;
    part.end = std::min(end * rows.group_rows, outputs);
    RunPasses(part, weight);
  });
  return y_MN;
}

// Returns whether row_product computes the product: both operands are f32 on a
// CPU and not empty, b is stored row by row, and a has few rows.
bool IsRowProduct(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return b_KN.stride(1) == 1 && HasCpuKernel(a_MK) && a_MK.numel() > 0 &&
         b_KN.numel() > 0 && a_MK.size(0) <= kernels::cpu::kSkinnyRows &&
         a_MK.stride(1) == 1 && b_KN.scalar_type() == at::kFloat;
}

at::Tensor RowMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                     const at::Tensor& bias_N) {
  const int64_t outputs = b_KN.size(1);
  at::Tensor y_MN = at::empty({a_MK.size(0), outputs}, a_MK.options());
  const kernels::cpu::RowProduct whole{
      .x_BI = a_MK.const_data_ptr<float>(),
      .x_stride = a_MK.stride(0),
      .num_rows = a_MK.size(0),
      .num_inputs = a_MK.size(1),
      .weight_IO = b_KN.const_data_ptr<float>(),
      .weight_stride = b_KN.stride(0),
      .y_BO = y_MN.mutable_data_ptr<float>(),
      .y_stride = outputs};
  constexpr int64_t kGroup = 64;  // A multiple of each kernel's block.
  ParallelFor(CeilDiv(outputs, kGroup), RowGrain(kGroup * a_MK.size(1)),
              [&](int64_t begin, int64_t end) {
                kernels::cpu::RowProduct part = whole;
                part.begin = begin * kGroup;
                part.end = std::min(end * kGroup, outputs);
                kernels::cpu::Kernels().row_product(part);
              });
  if (bias_N.defined()) y_MN.add_(bias_N);
  return y_MN;
}

at::Tensor Bf16MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                      const at::Tensor& bias_N) {
  at::Tensor y_MN = at::empty({a_MK.size(0), b_KN.size(1)}, a_MK.options());
  Bf16Product(RoundToBf16(a_MK), b_KN, y_MN);
  if (bias_N.defined()) y_MN.add_(bias_N);
  return y_MN;
}

// Returns a b + bias_N. Widens b to the dtype of a, one part at a time.
at::Tensor WidenedMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                         const at::Tensor& bias_N, RowCount row_count) {
  const int64_t inputs = std::max<int64_t>(1, b_KN.size(0));
  return MatMulByColumns(
      a_MK, b_KN.size(1), std::max<int64_t>(1, kWidenedElements / inputs),
      bias_N, row_count, [&](int64_t begin, int64_t end) {
        return b_KN.narrow(1, begin, end - begin).to(a_MK.scalar_type());
      });
}

}  // namespace

void RunSkinny(const kernels::cpu::SkinnyProduct& item,
               const at::Tensor& weight, int64_t first_row) {
  const int64_t first = first_row * item.weight_stride;
  const kernels::cpu::KernelTable& kernels = kernels::cpu::Kernels();
  if (weight.scalar_type() == at::kFloat) {
    kernels.skinny_product_f32(item, weight.const_data_ptr<float>() + first);
  } else if (IsInt8(weight)) {
    kernels.skinny_product_int8(item, weight.const_data_ptr<int8_t>() + first);
  } else {
    TORCH_CHECK(weight.scalar_type() == at::kBFloat16,
                "a weight of few rows is ", weight.scalar_type());
    kernels.skinny_product_bf16(
        item, static_cast<const uint16_t*>(weight.const_data_ptr()) + first);
  }
}

at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return MatMul(a_MK, b_KN, at::Tensor());
}

at::Tensor Linear(const at::Tensor& x_MI, const at::Tensor& weight_OI,
                  const at::Tensor& bias_O, RowCount row_count) {
  // For few rows, does not make the transposed view of the weight, because that
  // would take a noticeable part of a decode step.
  if (x_MI.size(0) <= kernels::cpu::kSkinnyRows && weight_OI.size(1) > 1 &&
      weight_OI.stride(1) == 1 && HasSkinnyRows(x_MI, weight_OI)) {
    return SkinnyMatMul(x_MI, weight_OI, weight_OI.size(0), weight_OI.stride(0),
                        bias_O);
  }
  return MatMul(x_MI, weight_OI.t(), bias_O, row_count);
}

at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                  const at::Tensor& bias_N, RowCount row_count) {
  if (IsBf16Product(a_MK, b_KN)) return Bf16MatMul(a_MK, b_KN, bias_N);
  if (IsSkinny(a_MK, b_KN)) {
    return SkinnyMatMul(a_MK, b_KN, b_KN.size(1), b_KN.stride(1), bias_N);
  }
  if (IsInt8(b_KN)) {
    return MatMulOfInt8(a_MK, b_KN, bias_N, row_count);
  }
  if (b_KN.scalar_type() != a_MK.scalar_type()) {
    return WidenedMatMul(a_MK, b_KN, bias_N, row_count);
  }
  if (IsRowProduct(a_MK, b_KN)) return RowMatMul(a_MK, b_KN, bias_N);
  if (row_count == RowCount::kVaries && TakesPanels(a_MK, b_KN)) {
    return PanelMatMul(a_MK, b_KN, bias_N);
  }
  if (!PrefersOneDnn(a_MK)) {
    return bias_N.defined() ? at::addmm(bias_N, a_MK, b_KN)
                            : at::mm(a_MK, b_KN);
  }
  return OneDnnMatMul(
      a_MK, b_KN,
      bias_N.defined() ? std::optional<at::Tensor>(bias_N) : std::nullopt);
}

void MatMulInto(const at::Tensor& a_MK, const at::Tensor& b_KN,
                at::Tensor y_MN) {
  if (IsBf16Product(a_MK, b_KN)) {
    Bf16Product(RoundToBf16(a_MK), b_KN, y_MN);
  } else {
    y_MN.copy_(MatMul(a_MK, b_KN));
  }
}

}  // namespace weft::ops
