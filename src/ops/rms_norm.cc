#include "src/ops/rms_norm.h"

#include <ATen/ATen.h>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

void CheckRows(const at::Tensor& x_TD, const at::Tensor& weight_D) {
  TORCH_CHECK(x_TD.dim() == 2, "rms_norm wants [T, D], got ", x_TD.sizes());
  TORCH_CHECK(weight_D.numel() == x_TD.size(1), "rms_norm weight has ",
              weight_D.numel(), " features, rows have ", x_TD.size(1));
  TORCH_CHECK(x_TD.size(1) <= 1 || x_TD.stride(1) == 1,
              "rms_norm wants unit stride in D");
}

// Holds x / rms(x) and 1 / rms(x), in the dtype of ComputeType.
struct Normalized {
  at::Tensor n_TD;
  at::Tensor inverse_T1;
};

Normalized Normalize(const at::Tensor& x_TD, double eps) {
  const at::Tensor x = x_TD.to(ComputeType(x_TD));
  const at::Tensor inverse = x.square().mean(1, true).add_(eps).rsqrt_();
  return {x * inverse, inverse};
}

// Writes y = RmsNorm(x). If `addend` is not null, first adds its rows to x.
void NormRows(const float* addend, int64_t addend_stride,
              const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
              const at::Tensor& y_TD) {
  const at::Tensor weight = weight_D.contiguous();
  const float* w = weight.const_data_ptr<float>();
  float* x = x_TD.mutable_data_ptr<float>();
  float* y = y_TD.mutable_data_ptr<float>();
  const int64_t features = x_TD.size(1);
  const kernels::cpu::KernelTable& kernels = kernels::cpu::Kernels();
  ParallelFor(
      x_TD.size(0), RowGrain(features), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          float* row = x + t * x_TD.stride(0);
          if (addend != nullptr) {
            kernels.add_row(addend + t * addend_stride, features, row);
          }
          kernels.rms_norm_row(row, w, features, static_cast<float>(eps),
                               y + t * y_TD.stride(0));
        }
      });
}

}  // namespace

void RmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
             at::Tensor& y_TD) {
  CheckRows(x_TD, weight_D);
  CheckRows(y_TD, weight_D);
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(x_TD)) return cuda::RmsNorm(x_TD, weight_D, eps, y_TD);
  }
  if (!HasCpuKernel(x_TD)) {
    const at::Tensor n_TD = Normalize(x_TD, eps).n_TD;
    y_TD.copy_(n_TD * weight_D.to(n_TD.scalar_type()));
    return;
  }
  NormRows(/*addend=*/nullptr, /*addend_stride=*/0, x_TD, weight_D, eps, y_TD);
}

void AddRmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
                at::Tensor& sum_TD, at::Tensor& y_TD) {
  CheckRows(x_TD, weight_D);
  CheckRows(sum_TD, weight_D);
  CheckRows(y_TD, weight_D);
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(x_TD)) {
      return cuda::AddRmsNorm(x_TD, weight_D, eps, sum_TD, y_TD);
    }
  }
  if (HasCpuKernel(x_TD)) {
    return NormRows(x_TD.const_data_ptr<float>(), x_TD.stride(0), sum_TD,
                    weight_D, eps, y_TD);
  }
  sum_TD.add_(x_TD);
  RmsNorm(sum_TD, weight_D, eps, y_TD);
}

void RmsNormBackward(const at::Tensor& dy_TD, const at::Tensor& x_TD,
                     const at::Tensor& weight_D, double eps,
                     at::Tensor& dx_TD) {
  CheckRows(dy_TD, weight_D);
  CheckRows(x_TD, weight_D);
  CheckRows(dx_TD, weight_D);
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(x_TD)) {
      return cuda::RmsNormBackward(dy_TD, x_TD, weight_D, eps, dx_TD);
    }
  }
  if (!HasCpuKernel(x_TD)) {
    const Normalized norm = Normalize(x_TD, eps);
    const at::ScalarType compute = norm.n_TD.scalar_type();
    const at::Tensor d_TD = dy_TD.to(compute) * weight_D.to(compute);
    const at::Tensor mean = (d_TD * norm.n_TD).mean(1, true);
    const at::Tensor dx = (d_TD - norm.n_TD * mean) * norm.inverse_T1;
    dx_TD.copy_(dx_TD.to(compute) + dx);
    return;
  }
  const at::Tensor weight = weight_D.contiguous();
  const float* dy = dy_TD.const_data_ptr<float>();
  const float* x = x_TD.const_data_ptr<float>();
  const float* w = weight.const_data_ptr<float>();
  float* dx = dx_TD.mutable_data_ptr<float>();
  const int64_t features = x_TD.size(1);
  const auto row_kernel = kernels::cpu::Kernels().rms_norm_backward_row;
  ParallelFor(x_TD.size(0), RowGrain(features),
              [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                  row_kernel(dy + t * dy_TD.stride(0), x + t * x_TD.stride(0),
                             w, features, static_cast<float>(eps),
                             dx + t * dx_TD.stride(0));
                }
              });
}

}  // namespace weft::ops
