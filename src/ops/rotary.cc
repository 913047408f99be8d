#include "src/ops/rotary.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::ops {
namespace {

void RotateReference(at::Tensor& x_TMC, const at::Tensor& positions_T,
                     const RotaryTable& table, bool inverse) {
  const at::ScalarType compute = ComputeType(x_TMC);
  const at::Tensor rows = positions_T.to(at::kLong);
  // One angle per (token, feature), shared by the heads.
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

}  // namespace

RotaryTable MakeRotaryTable(const std::vector<double>& inverse_frequencies,
                            int64_t num_positions, at::Device device) {
  // The angles are rounded as the models were trained with them: frequencies
  // and products in f32.
  const at::Tensor frequencies = at::tensor(inverse_frequencies, at::kFloat);
  const at::Tensor angles =
      at::outer(at::arange(num_positions, at::kFloat), frequencies)
          .to(at::kDouble);
  return {angles.cos().to(device, at::kFloat),
          angles.sin().to(device, at::kFloat)};
}

void ApplyRotary(at::Tensor& x_TMC, const at::Tensor& positions_T,
                 const RotaryTable& table, bool inverse) {
  TORCH_CHECK(x_TMC.dim() == 3, "rotary wants [T, M, C], got ", x_TMC.sizes());
  const int64_t tokens = x_TMC.size(0);
  const int64_t heads = x_TMC.size(1);
  const int64_t half = x_TMC.size(2) / 2;
  TORCH_CHECK(x_TMC.size(2) == 2 * table.cos_PC.size(1), "rotary head has ",
              x_TMC.size(2), " features, the table has ",
              2 * table.cos_PC.size(1));
  TORCH_CHECK(positions_T.numel() == tokens, "rotary has ", positions_T.numel(),
              " positions for ", tokens, " tokens");
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(x_TMC) && (half == 0 || x_TMC.stride(2) == 1)) {
      cuda::ApplyRotary(x_TMC, positions_T, table, inverse);
      return;
    }
  }
  if (!HasCpuKernel(x_TMC)) {
    RotateReference(x_TMC, positions_T, table, inverse);
    return;
  }
  TORCH_CHECK(half == 0 || x_TMC.stride(2) == 1,
              "rotary wants unit stride in C");
  const at::Tensor contiguous_positions = positions_T.contiguous();
  const int32_t* positions = contiguous_positions.const_data_ptr<int32_t>();
  const float* cos = table.cos_PC.const_data_ptr<float>();
  const float* sin = table.sin_PC.const_data_ptr<float>();
  float* x = x_TMC.mutable_data_ptr<float>();
  const auto head_kernel = kernels::cpu::Kernels().rotary_head;
  at::parallel_for(
      0, tokens, RowGrain(heads * 2 * half), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int64_t row = positions[t] * half;
          for (int64_t m = 0; m < heads; ++m) {
            head_kernel(x + t * x_TMC.stride(0) + m * x_TMC.stride(1),
                        cos + row, sin + row, half, inverse);
          }
        }
      });
}

}  // namespace weft::ops
