#include "src/ops/rotary.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/paged_attention.h"
#include "src/ops/rms_norm.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

void RotateReference(at::Tensor& x_TMC, const at::Tensor& positions_T,
                     const RotaryTable& table, bool inverse) {
  const at::ScalarType compute = ComputeType(x_TMC);
  const at::Tensor rows = positions_T.to(at::kLong);
  // All heads share the angle of a token and a feature.
  const at::Tensor cos =
      table.cos_PC.index_select(0, rows).to(compute).unsqueeze(1);
  at::Tensor sin = table.sin_PC.index_select(0, rows).to(compute).unsqueeze(1);
  if (inverse) sin = -sin;
  const int64_t half = x_TMC.size(2) / 2;
  const at::Tensor a = x_TMC.narrow(2, 0, half).to(compute);
  const at::Tensor b = x_TMC.narrow(2, half, half).to(compute);
  const at::Tensor first = a * cos - b * sin;
  const at::Tensor second = b * cos + a * sin;
  x_TMC.narrow(2, 0, half).copy_(first);
  x_TMC.narrow(2, half, half).copy_(second);
}

void CheckHeads(const at::Tensor& x_TMC, const at::Tensor& positions_T,
                const RotaryTable& table) {
  TORCH_CHECK(x_TMC.dim() == 3, "rotary wants [T, M, C], got ", x_TMC.sizes());
  TORCH_CHECK(x_TMC.size(2) == 2 * table.cos_PC.size(1), "rotary head has ",
              x_TMC.size(2), " features, the table has ",
              2 * table.cos_PC.size(1));
  TORCH_CHECK(positions_T.numel() == x_TMC.size(0), "rotary has ",
              positions_T.numel(), " positions for ", x_TMC.size(0), " tokens");
}

void CheckArguments(const Heads& heads, const at::Tensor& positions_T,
                    const RotaryTable& table, const HeadNorms& norms) {
  CheckHeads(heads.q_TQC, positions_T, table);
  CheckHeads(heads.k_TKC, positions_T, table);
  const int64_t features = heads.q_TQC.size(2);
  for (const at::Tensor& weight_C : {norms.q_C, norms.k_C}) {
    TORCH_CHECK(weight_C.defined() == norms.q_C.defined() &&
                    (!weight_C.defined() || weight_C.numel() == features),
                "rotary heads of ", features,
                " features want norms of as many");
  }
}

void CheckUnitStride(const at::Tensor& x_TMC) {
  TORCH_CHECK(x_TMC.size(2) == 0 || x_TMC.stride(2) == 1,
              "heads want unit stride in C");
}

// Norms each head of x in place.
void Normalize(const at::Tensor& x_TMC, const at::Tensor& weight_C,
               double eps) {
  const int64_t heads = x_TMC.size(1);
  if (!HasCpuKernel(x_TMC)) {
    for (int64_t m = 0; m < heads; ++m) {
      at::Tensor head_TC = x_TMC.select(1, m);
      RmsNorm(head_TC, weight_C, eps, head_TC);
    }
    return;
  }
  CheckUnitStride(x_TMC);
  const int64_t features = x_TMC.size(2);
  const at::Tensor weight = weight_C.contiguous();
  const float* w = weight.const_data_ptr<float>();
  float* x = x_TMC.mutable_data_ptr<float>();
  const auto row_kernel = kernels::cpu::Kernels().rms_norm_row;
  ParallelFor(x_TMC.size(0), RowGrain(heads * features),
              [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                  for (int64_t m = 0; m < heads; ++m) {
                    float* row = x + t * x_TMC.stride(0) + m * x_TMC.stride(1);
                    row_kernel(row, w, features, static_cast<float>(eps), row);
                  }
                }
              });
}

void NormalizeBackwardReference(const at::Tensor& d_TMC,
                                const at::Tensor& raw_TMC,
                                const at::Tensor& weight_C, double eps) {
  for (int64_t m = 0; m < d_TMC.size(1); ++m) {
    at::Tensor head_TC = d_TMC.select(1, m);
    at::Tensor dx_TC = at::zeros(head_TC.sizes(), head_TC.options());
    RmsNormBackward(head_TC, raw_TMC.select(1, m), weight_C, eps, dx_TC);
    head_TC.copy_(dx_TC);
  }
}

// Replaces d, the gradient of the normed heads, by the gradient of the raw
// heads.
void NormalizeBackward(const at::Tensor& d_TMC, const at::Tensor& raw_TMC,
                       const at::Tensor& weight_C, double eps) {
  TORCH_CHECK(raw_TMC.sizes() == d_TMC.sizes(), "gradient of heads ",
              d_TMC.sizes(), " has raw heads ", raw_TMC.sizes());
  if (!HasCpuKernel(d_TMC)) {
    return NormalizeBackwardReference(d_TMC, raw_TMC, weight_C, eps);
  }
  CheckUnitStride(d_TMC);
  CheckUnitStride(raw_TMC);
  const int64_t heads = d_TMC.size(1);
  const int64_t features = d_TMC.size(2);
  const at::Tensor weight = weight_C.contiguous();
  const float* w = weight.const_data_ptr<float>();
  const float* raw = raw_TMC.const_data_ptr<float>();
  float* d = d_TMC.mutable_data_ptr<float>();
  const auto row_kernel = kernels::cpu::Kernels().rms_norm_backward_row;
  ParallelFor(
      d_TMC.size(0), RowGrain(heads * features),
      [&](int64_t begin, int64_t end) {
        // The kernel adds to its output, so the output must not be its input.
        std::vector<float> dx(features);
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t m = 0; m < heads; ++m) {
            float* row = d + t * d_TMC.stride(0) + m * d_TMC.stride(1);
            std::fill(dx.begin(), dx.end(), 0.0F);
            row_kernel(row, raw + t * raw_TMC.stride(0) + m * raw_TMC.stride(1),
                       w, features, static_cast<float>(eps), dx.data());
            std::copy(dx.begin(), dx.end(), row);
          }
        }
      });
}

// Rotates the heads in place, or rotates them back if `inverse`.
void Rotate(const at::Tensor& heads_TMC, const at::Tensor& positions_T,
            const RotaryTable& table, bool inverse) {
  at::Tensor x_TMC = heads_TMC;
  const int64_t tokens = x_TMC.size(0);
  const int64_t heads = x_TMC.size(1);
  const int64_t half = x_TMC.size(2) / 2;
  if (!HasCpuKernel(x_TMC)) {
    return RotateReference(x_TMC, positions_T, table, inverse);
  }
  CheckUnitStride(x_TMC);
  const at::Tensor contiguous_positions = positions_T.contiguous();
  const int32_t* positions = contiguous_positions.const_data_ptr<int32_t>();
  const float* cos = table.cos_PC.const_data_ptr<float>();
  const float* sin = table.sin_PC.const_data_ptr<float>();
  float* x = x_TMC.mutable_data_ptr<float>();
  const auto head_kernel = kernels::cpu::Kernels().rotary_head;
  ParallelFor(tokens, RowGrain(heads * 2 * half),
              [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                  const int64_t row = positions[t] * half;
                  for (int64_t m = 0; m < heads; ++m) {
                    head_kernel(x + t * x_TMC.stride(0) + m * x_TMC.stride(1),
                                cos + row, sin + row, half, inverse);
                  }
                }
              });
}

// Returns whether the CUDA kernel takes the heads: f32 or bf16 on CUDA, with
// unit stride in C.
bool TakesKernel(const Heads& heads) {
  return HasCudaKernel(heads.q_TQC) && heads.q_TQC.stride(2) == 1 &&
         heads.k_TKC.stride(2) == 1;
}

}  // namespace

RotaryTable MakeRotaryTable(const std::vector<double>& inverse_frequencies,
                            int64_t num_positions, at::Device device,
                            double magnitude) {
  // The models were trained with frequencies and products in f32, so the angles
  // are rounded in the same way.
  const at::Tensor frequencies = at::tensor(inverse_frequencies, at::kFloat);
  const at::Tensor angles =
      at::outer(at::arange(num_positions, at::kFloat), frequencies)
          .to(at::kDouble);
  const at::Tensor sizes =
      at::where(frequencies == 0, 1.0, magnitude).to(at::kDouble);
  return {(angles.cos() * sizes).to(device, at::kFloat),
          (angles.sin() * sizes).to(device, at::kFloat)};
}

void PrepareHeads(const Heads& heads, const at::Tensor& positions_T,
                  const RotaryTable& table, const HeadNorms& norms,
                  const KvSlots& slots) {
  CheckArguments(heads, positions_T, table, norms);
  if constexpr (kHasCudaKernels) {
    if (TakesKernel(heads)) {
      return cuda::PrepareHeads(heads, positions_T, table, norms, slots);
    }
  }
  if (norms.q_C.defined()) {
    Normalize(heads.q_TQC, norms.q_C, norms.eps);
    Normalize(heads.k_TKC, norms.k_C, norms.eps);
  }
  Rotate(heads.q_TQC, positions_T, table, /*inverse=*/false);
  Rotate(heads.k_TKC, positions_T, table, /*inverse=*/false);
  if (slots.slots_T.defined()) {
    at::Tensor k_pages_PSKC = slots.k_pages_PSKC;
    at::Tensor v_pages_PSKC = slots.v_pages_PSKC;
    WriteKvPages(heads.k_TKC, heads.v_TKC, slots.slots_T, k_pages_PSKC,
                 v_pages_PSKC);
  }
}

void PrepareHeadsBackward(const Heads& gradients, const at::Tensor& positions_T,
                          const RotaryTable& table, const HeadNorms& norms,
                          const Heads& raw, const Heads& into) {
  CheckArguments(gradients, positions_T, table, norms);
  CheckArguments(into, positions_T, table, norms);
  if constexpr (kHasCudaKernels) {
    if (TakesKernel(gradients) && TakesKernel(into)) {
      return cuda::PrepareHeadsBackward(gradients, positions_T, table, norms,
                                        raw, into);
    }
  }
  // copy_ does nothing if source and target are the same memory.
  into.q_TQC.copy_(gradients.q_TQC);
  into.k_TKC.copy_(gradients.k_TKC);
  into.v_TKC.copy_(gradients.v_TKC);
  Rotate(into.q_TQC, positions_T, table, /*inverse=*/true);
  Rotate(into.k_TKC, positions_T, table, /*inverse=*/true);
  if (norms.q_C.defined()) {
    NormalizeBackward(into.q_TQC, raw.q_TQC, norms.q_C, norms.eps);
    NormalizeBackward(into.k_TKC, raw.k_TKC, norms.k_C, norms.eps);
  }
}

}  // namespace weft::ops
