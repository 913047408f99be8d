// cuda_on_host finds what it is there to find.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <vector>

#include "kernels/cuda/warp_matrix.cuh"

namespace weft::testing::cuda_on_host {
namespace {

constexpr unsigned kThreads = 64;

// Each thread gives its neighbour on either side a number.
void ShiftKernel(bool waits, int distance, int* out) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = -1;
  __syncthreads();
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (waits) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + kThreads + distance) % kThreads];
}

// Every warp overwrites what the others read before the barrier between.
void OverwriteKernel(bool waits, int* out) {
  __shared__ int shared;
  shared = 1;
  __syncthreads();
  out[threadIdx.x] = shared;
  if (waits) __syncthreads();
  shared = 2;
}

// Only some threads of the block come to the barrier.
void DivergentKernel() {
  if (threadIdx.x < kThreads / 2) __syncthreads();
}

template <typename... Parameters, typename... Arguments>
cudaError_t RunBlock(unsigned threads, void (*kernel)(Parameters...),
                     Arguments... arguments) {
  cudaLaunchConfig_t config;
  config.blockDim.x = threads;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

bool IsShifted(bool waits, int distance) {
  std::vector<int> out(kThreads, -2), expected(kThreads);
  EXPECT_EQ(RunBlock(kThreads, ShiftKernel, waits, distance, out.data()),
            cudaSuccess);
  for (unsigned i = 0; i < kThreads; ++i) {
    expected[i] = static_cast<int>((i + kThreads + distance) % kThreads);
  }
  return out == expected;
}

TEST(CudaOnHostTest, AMissingBarrierComesOutWrong) {
  for (const int distance : {1, -1}) {
    EXPECT_TRUE(IsShifted(true, distance));
    EXPECT_FALSE(IsShifted(false, distance));
  }
}

TEST(CudaOnHostTest, AnOverwriteWithoutABarrierComesOutWrong) {
  for (const bool waits : {true, false}) {
    std::vector<int> out(kThreads);
    EXPECT_EQ(RunBlock(kThreads, OverwriteKernel, waits, out.data()),
              cudaSuccess);
    EXPECT_EQ(out == std::vector<int>(kThreads, 1), waits);
  }
}

TEST(CudaOnHostDeathTest, ABarrierThatNotAllThreadsReachEndsTheProcess) {
  EXPECT_DEATH((void)RunBlock(kThreads, DivergentKernel),
               "not all threads reach a barrier");
}

// Small whole numbers, of which bf16 and sums in f32 are exact.
float Number(unsigned row, unsigned column) {
  return static_cast<float>((row * 7 + column * 3) % 11) - 5;
}

unsigned Word(float low, float high) {
  return kernels::cuda::PackBf16(low, high);
}

// What each lane gives and gets is written down here once more, after the
// tables of the instruction set.
void MatrixKernel(float* product, unsigned* transposed) {
  const unsigned g = threadIdx.x / 4;
  const unsigned t = threadIdx.x % 4;
  unsigned a[4], b[2];
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = g + i % 2 * 8;
    const unsigned column = 2 * t + i / 2 * 8;
    a[i] = Word(Number(row, column), Number(row, column + 1));
  }
  for (unsigned i = 0; i < 2; ++i) {
    const unsigned row = 2 * t + i * 8;
    b[i] = Word(Number(row, g), Number(row + 1, g));
  }
  float d[4] = {1, 1, 1, 1};
  kernels::cuda::MultiplyAdd(a, b, d);
  for (unsigned i = 0; i < 4; ++i) {
    product[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
  }
  const unsigned word =
      kernels::cuda::Transpose8x8(Word(Number(g, 2 * t), Number(g, 2 * t + 1)));
  transposed[threadIdx.x] = word;
}

TEST(CudaOnHostTest, WarpMatricesMultiplyAndTranspose) {
  std::vector<float> product(16 * 8);
  std::vector<unsigned> transposed(32);
  ASSERT_EQ(RunBlock(32, MatrixKernel, product.data(), transposed.data()),
            cudaSuccess);
  for (unsigned i = 0; i < 16; ++i) {
    for (unsigned j = 0; j < 8; ++j) {
      float sum = 1;
      for (unsigned k = 0; k < 16; ++k) sum += Number(i, k) * Number(k, j);
      EXPECT_EQ(product[i * 8 + j], sum) << i << " " << j;
    }
  }
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned row = i / 4;
    const unsigned column = i % 4 * 2;
    EXPECT_EQ(transposed[i], Word(Number(column, row), Number(column + 1, row)))
        << i;
  }
}

TEST(CudaOnHostTest, PacksTwoNumbersToNearest) {
  EXPECT_EQ(kernels::cuda::PackBf16(1.0F, -2.0F), 0xC0003F80U);
  // Half of the last digit, and a little more.
  EXPECT_EQ(kernels::cuda::PackBf16(1 + 0x1p-8F, 1 + 0x1.01p-8F), 0x3F813F80U);
}

void ExchangeKernel(unsigned* count, unsigned* read, unsigned* bytes) {
  read[threadIdx.x] =
      __shfl_sync(0xFFFFFFFFU, threadIdx.x, static_cast<int>(threadIdx.x) / 3);
  bytes[threadIdx.x] = __byte_perm(0x33221100U, 0x77665544U, 0x7250U);
  atomicInc(count, 32 + 2);
}

TEST(CudaOnHostTest, LanesReadCountAndPickBytes) {
  unsigned count = 0;
  std::vector<unsigned> read(kThreads), bytes(kThreads);
  ASSERT_EQ(
      RunBlock(kThreads, ExchangeKernel, &count, read.data(), bytes.data()),
      cudaSuccess);
  // From 34 back to 0.
  EXPECT_EQ(count, kThreads - 35);
  for (unsigned i = 0; i < kThreads; ++i) {
    EXPECT_EQ(read[i], i / 32 * 32 + i / 3 % 32);
    EXPECT_EQ(bytes[i], 0x77225500U);
  }
}

TEST(CudaOnHostTest, RefusesWhatADeviceRefuses) {
  EXPECT_EQ(RunBlock(0, DivergentKernel), cudaErrorInvalidConfiguration);
  EXPECT_EQ(RunBlock(2048, DivergentKernel), cudaErrorInvalidConfiguration);
  cudaLaunchConfig_t config;
  config.blockDim.x = kThreads;
  config.gridDim.x = 0;
  EXPECT_EQ(cudaLaunchKernelEx(&config, DivergentKernel),
            cudaErrorInvalidConfiguration);
}

}  // namespace
}  // namespace weft::testing::cuda_on_host
