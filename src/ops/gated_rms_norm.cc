#include <ATen/ATen.h>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_delta.h"
#include "src/ops/gated_delta.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

void CheckNorm(const at::Tensor& x_THV, const at::Tensor& y_THV,
               const at::Tensor& weight_V) {
  TORCH_CHECK(
      x_THV.dim() == 3 && y_THV.sizes() == x_THV.sizes() &&
          y_THV.scalar_type() == x_THV.scalar_type() &&
          weight_V.numel() == x_THV.size(2),
      "gated norm wants two tensors [T, H, V] of one dtype and a weight "
      "[V], got ",
      x_THV.sizes(), ", ", y_THV.sizes(), " and ", weight_V.sizes());
  TORCH_CHECK(x_THV.stride(2) == 1 && y_THV.stride(2) == 1,
              "gated norm wants unit stride in V");
}

// Calls run(t, h) for all heads of all rows.
template <typename Run>
void ForHeads(const at::Tensor& x_THV, const Run& run) {
  const int64_t heads = x_THV.size(1);
  ParallelFor(x_THV.size(0) * heads, RowGrain(x_THV.size(2)),
              [&](int64_t begin, int64_t end) {
                for (int64_t i = begin; i < end; ++i) run(i / heads, i % heads);
              });
}

// Returns the head's features.
float* HeadOf(const at::Tensor& x_THV, int64_t t, int64_t h) {
  return x_THV.mutable_data_ptr<float>() + t * x_THV.stride(0) +
         h * x_THV.stride(1);
}

}  // namespace

at::Tensor GatedRmsNorm(const at::Tensor& x_THV, const at::Tensor& z_THV,
                        const at::Tensor& weight_V, double eps) {
  CheckNorm(x_THV, z_THV, weight_V);
  at::Tensor y_THV = at::empty(x_THV.sizes(), x_THV.options());
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(x_THV)) {
      cuda::GatedRmsNorm(x_THV, z_THV, weight_V, eps, y_THV);
      return y_THV;
    }
  }
  if (!HasCpuKernel(x_THV)) {
    const at::ScalarType compute = ComputeType(x_THV);
    const at::Tensor x = x_THV.to(compute), z = z_THV.to(compute);
    const at::Tensor n = x * x.square().mean(-1, true).add_(eps).rsqrt_();
    return y_THV.copy_(n * weight_V.to(compute) * z * z.sigmoid());
  }
  const at::Tensor weight = weight_V.contiguous();
  ForHeads(x_THV, [&](int64_t t, int64_t h) {
    kernels::cpu::Kernels().gated_norm_row(
        HeadOf(x_THV, t, h), HeadOf(z_THV, t, h),
        weight.const_data_ptr<float>(), x_THV.size(2), static_cast<float>(eps),
        HeadOf(y_THV, t, h));
  });
  return y_THV;
}

void GatedRmsNormBackward(const at::Tensor& dy_THV, const at::Tensor& x_THV,
                          const at::Tensor& z_THV, const at::Tensor& weight_V,
                          double eps, const at::Tensor& dx_THV,
                          const at::Tensor& dz_THV) {
  CheckNorm(x_THV, z_THV, weight_V);
  CheckNorm(x_THV, dy_THV, weight_V);
  CheckNorm(x_THV, dx_THV, weight_V);
  CheckNorm(x_THV, dz_THV, weight_V);
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(x_THV)) {
      return cuda::GatedRmsNormBackward(dy_THV, x_THV, z_THV, weight_V, eps,
                                        dx_THV, dz_THV);
    }
  }
  if (HasCpuKernel(x_THV)) {
    const at::Tensor weight = weight_V.contiguous();
    ForHeads(x_THV, [&](int64_t t, int64_t h) {
      kernels::cpu::Kernels().gated_norm_backward_row(
          HeadOf(dy_THV, t, h), HeadOf(x_THV, t, h), HeadOf(z_THV, t, h),
          weight.const_data_ptr<float>(), x_THV.size(2),
          static_cast<float>(eps), HeadOf(dx_THV, t, h), HeadOf(dz_THV, t, h));
    });
    return;
  }
  const at::ScalarType compute = ComputeType(x_THV);
  const at::Tensor x = x_THV.to(compute), z = z_THV.to(compute);
  const at::Tensor inverse = x.square().mean(-1, true).add_(eps).rsqrt_();
  const at::Tensor n = x * inverse;
  const at::Tensor sigmoid = z.sigmoid();
  const at::Tensor d = dy_THV.to(compute) * weight_V.to(compute);
  const at::Tensor dn = d * z * sigmoid;
  dx_THV.copy_((dn - n * (dn * n).mean(-1, true)) * inverse);
  dz_THV.copy_(d * n * sigmoid * (1 + z * (1 - sigmoid)));
}

}  // namespace weft::ops
