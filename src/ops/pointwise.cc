#include "src/ops/pointwise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/thread_team.h"

namespace weft::ops {
namespace {

// Returns run(x, count, y) of all elements.
template <typename Run>
at::Tensor OfAll(const at::Tensor& x, int64_t grain, Run run) {
  const at::Tensor from = x.contiguous();
  at::Tensor result = at::empty_like(from);
  const float* data = from.const_data_ptr<float>();
  auto* to = result.mutable_data_ptr<float>();
  ParallelFor(from.numel(), grain, [&](int64_t begin, int64_t end) {
    run(data + begin, end - begin, to + begin);
  });
  return result;
}

}  // namespace

at::Tensor Sigmoid(const at::Tensor& x) {
  if (!HasCpuKernel(x)) return x.sigmoid();
  constexpr int64_t kGrain = 16384;
  return OfAll(x, kGrain, kernels::cpu::Kernels().sigmoid_row);
}

at::Tensor Softplus(const at::Tensor& x) {
  if (!HasCpuKernel(x)) return at::softplus(x);
  constexpr int64_t kGrain = 1024;  // The functions of <cmath> are slow.
  return OfAll(x, kGrain, [](const float* from, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] =
          std::max(from[i], 0.0F) + std::log1p(std::exp(-std::abs(from[i])));
    }
  });
}

void SoftcapInPlace(double softcap, at::Tensor& x) {
  if (!HasCpuKernel(x)) {
    x.div_(softcap).tanh_().mul_(softcap);
    return;
  }
  constexpr int64_t kGrain = 16384;
  auto* data = x.mutable_data_ptr<float>();
  ParallelFor(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    kernels::cpu::Kernels().softcap_row(
        data + begin, end - begin, static_cast<float>(softcap), data + begin);
  });
}

}  // namespace weft::ops
