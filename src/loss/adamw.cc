#include "src/loss/adamw.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"

namespace weft::loss {
namespace {

// The number of elements in a partial sum of a norm, and the grain size of
// AdamWStep's loop. It is fixed, so a norm does not depend on the number of
// threads.
constexpr int64_t kBlock = 65536;

using ops::HasCpuKernel;
using ops::kHasCudaKernels;

// Returns whether the CUDA kernels that this file calls support the tensor.
// They support only f32.
bool HasCudaKernel(const at::Tensor& tensor) {
  return ops::HasCudaKernel(tensor) && tensor.scalar_type() == at::kFloat;
}

// The constants of one update of all weights, in f64.
struct Update {
  double gradient_scale;
  double weight_scale;
  double step_size;
  double inverse_sqrt_bias2;
};

Update MakeUpdate(const AdamWConfig& config, int64_t step, double grad_norm) {
  const double bias1 = 1 - std::pow(config.beta1, step);
  const double bias2 = 1 - std::pow(config.beta2, step);
  return {.gradient_scale = GradientScale(config.max_grad_norm, grad_norm),
          .weight_scale = 1 - config.learning_rate * config.weight_decay,
          .step_size = config.learning_rate / bias1,
          .inverse_sqrt_bias2 = 1 / std::sqrt(bias2)};
}

void StepReference(const AdamWConfig& config, const Update& update,
                   const at::Tensor& weights_N, const at::Tensor& gradient_N,
                   at::Tensor& moment1_N, at::Tensor& moment2_N,
                   at::Tensor& weights_out_N) {
  // Allocates all memory first. So an allocation that fails changes nothing.
  const at::Tensor g = gradient_N * update.gradient_scale;
  at::Tensor deviation = at::empty_like(moment2_N);
  moment1_N.mul_(config.beta1).add_(g, 1 - config.beta1);
  moment2_N.mul_(config.beta2).addcmul_(g, g, 1 - config.beta2);
  at::sqrt_out(deviation, moment2_N)
      .mul_(update.inverse_sqrt_bias2)
      .add_(config.eps);
  if (!weights_out_N.is_same(weights_N)) weights_out_N.copy_(weights_N);
  weights_out_N.mul_(update.weight_scale)
      .addcdiv_(moment1_N, deviation, -update.step_size);
}

}  // namespace

double GradientScale(double max_grad_norm, double grad_norm) {
  if (max_grad_norm <= 0) return 1;
  const double scale = max_grad_norm / (grad_norm + 1e-6);
  return scale > 1 ? 1 : scale;  // Keeps NaN.
}

bool SquareFits(double max_grad_norm, double grad_norm) {
  const double clipped = grad_norm * GradientScale(max_grad_norm, grad_norm);
  // Comparisons with NaN are false.
  return std::isfinite(grad_norm) &&
         clipped * clipped <= std::numeric_limits<float>::max();
}

double GradientNorm(const at::Tensor& gradient_N) {
  ops::CheckArgument("gradient_N", gradient_N, gradient_N,
                     gradient_N.scalar_type(), {gradient_N.numel()});
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(gradient_N)) {
      return std::sqrt(ops::cuda::SumOfSquares(gradient_N));
    }
  }
  if (!HasCpuKernel(gradient_N)) {
    return std::sqrt(gradient_N.to(at::kDouble).square().sum().item<double>());
  }
  const float* gradient = gradient_N.const_data_ptr<float>();
  const int64_t count = gradient_N.numel();
  std::vector<double> partial((count + kBlock - 1) / kBlock);
  const auto kernel = kernels::cpu::Kernels().sum_of_squares;
  at::parallel_for(0, static_cast<int64_t>(partial.size()), 1,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t b = begin; b < end; ++b) {
                       const int64_t first = b * kBlock;
                       partial[b] = kernel(gradient + first,
                                           std::min(kBlock, count - first));
                     }
                   });
  double total = 0;
  for (double sum : partial) total += sum;
  return std::sqrt(total);
}

void AdamWStep(const AdamWConfig& config, int64_t step, double grad_norm,
               const at::Tensor& weights_N, const at::Tensor& gradient_N,
               at::Tensor& moment1_N, at::Tensor& moment2_N,
               at::Tensor& weights_out_N) {
  TORCH_CHECK(step >= 1, "AdamW counts steps from 1, got ", step);
  const auto check = [&](const char* name, const at::Tensor& tensor_N) {
    ops::CheckArgument(name, tensor_N, weights_N, weights_N.scalar_type(),
                       {weights_N.numel()});
  };
  check("weights_N", weights_N);
  check("gradient_N", gradient_N);
  check("moment1_N", moment1_N);
  check("moment2_N", moment2_N);
  check("weights_out_N", weights_out_N);
  const Update update = MakeUpdate(config, step, grad_norm);
  const kernels::cpu::AdamWScalars scalars{
      .gradient_scale = static_cast<float>(update.gradient_scale),
      .beta1 = static_cast<float>(config.beta1),
      .one_minus_beta1 = static_cast<float>(1 - config.beta1),
      .beta2 = static_cast<float>(config.beta2),
      .one_minus_beta2 = static_cast<float>(1 - config.beta2),
      .weight_scale = static_cast<float>(update.weight_scale),
      .step_size = static_cast<float>(update.step_size),
      .inverse_sqrt_bias2 = static_cast<float>(update.inverse_sqrt_bias2),
      .eps = static_cast<float>(config.eps)};
  if constexpr (kHasCudaKernels) {
    if (HasCudaKernel(weights_N)) {
      return ops::cuda::AdamW(scalars, weights_N, gradient_N, moment1_N,
                              moment2_N, weights_out_N);
    }
  }
  if (!HasCpuKernel(weights_N)) {
    return StepReference(config, update, weights_N, gradient_N, moment1_N,
                         moment2_N, weights_out_N);
  }
  const float* weights = weights_N.const_data_ptr<float>();
  const float* gradient = gradient_N.const_data_ptr<float>();
  float* moment1 = moment1_N.mutable_data_ptr<float>();
  float* moment2 = moment2_N.mutable_data_ptr<float>();
  float* out = weights_out_N.mutable_data_ptr<float>();
  const auto kernel = kernels::cpu::Kernels().adamw;
  at::parallel_for(
      0, weights_N.numel(), kBlock, [&](int64_t begin, int64_t end) {
        kernel(scalars, end - begin, weights + begin, gradient + begin,
               moment1 + begin, moment2 + begin, out + begin);
      });
}

}  // namespace weft::loss
