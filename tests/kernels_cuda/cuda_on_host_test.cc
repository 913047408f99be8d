// cuda_on_host finds what it is there to find.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

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
