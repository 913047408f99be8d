#include "kernels/cuda/adamw.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;
// The number of elements that a block of AdamWKernel updates, and the number
// that a block of SumOfSquaresKernel sums.
constexpr int64_t kUpdateBlock = 1024;
constexpr int64_t kSumBlock = 32768;

__global__ void AdamWKernel(cpu::AdamWScalars scalars, int64_t count,
                            const float* weights_N, const float* gradient_N,
                            float* moment1_N, float* moment2_N,
                            float* weights_out_N) {
  const int64_t begin = blockIdx.x * kUpdateBlock;
  const int64_t end =
      begin + kUpdateBlock < count ? begin + kUpdateBlock : count;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const float g = gradient_N[i] * scalars.gradient_scale;
    const float m = scalars.beta1 * moment1_N[i] + scalars.one_minus_beta1 * g;
    const float v =
        scalars.beta2 * moment2_N[i] + scalars.one_minus_beta2 * g * g;
    moment1_N[i] = m;
    moment2_N[i] = v;
    const float deviation = sqrtf(v) * scalars.inverse_sqrt_bias2 + scalars.eps;
    weights_out_N[i] =
        weights_N[i] * scalars.weight_scale - scalars.step_size * m / deviation;
  }
}

// Block b writes the sum of squares of its elements to partials[b].
__global__ void SumOfSquaresKernel(const float* x_N, int64_t count,
                                   double* partials) {
  const int64_t begin = blockIdx.x * kSumBlock;
  const int64_t end = begin + kSumBlock < count ? begin + kSumBlock : count;
  double sum = 0;
  for (int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const auto x = static_cast<double>(x_N[i]);
    sum += x * x;
  }
  sum = BlockReduce(sum, Add());
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Replaces partials[0] by the sum of all partials. Runs as one block.
__global__ void SumPartialsKernel(double* partials, int64_t count) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += partials[i];
  sum = BlockReduce(sum, Add());
  if (threadIdx.x == 0) partials[0] = sum;
}

}  // namespace

cudaError_t AdamW(const cpu::AdamWScalars& scalars, int64_t count,
                  const float* weights_N, const float* gradient_N,
                  float* moment1_N, float* moment2_N, float* weights_out_N,
                  cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  return Launch(AdamWKernel, CeilDiv(count, kUpdateBlock), 1, kThreads, stream,
                scalars, count, weights_N, gradient_N, moment1_N, moment2_N,
                weights_out_N);
}

int64_t SumOfSquaresPartials(int64_t count) {
  return count <= kSumBlock ? 1 : CeilDiv(count, kSumBlock);
}

cudaError_t SumOfSquares(const float* x_N, int64_t count, double* partials,
                         cudaStream_t stream) {
  const int64_t num_partials = SumOfSquaresPartials(count);
  const cudaError_t status = Launch(SumOfSquaresKernel, num_partials, 1,
                                    kThreads, stream, x_N, count, partials);
  if (status != cudaSuccess || num_partials == 1) return status;
  return Launch(SumPartialsKernel, 1, 1, kThreads, stream, partials,
                num_partials);
}

}  // namespace weft::kernels::cuda
