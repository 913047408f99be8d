// Tests that cuda_on_host detects the errors that it must detect.
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <ptx_on_host.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/pack.cuh"
#include "tests/kernels/cuda/device_array.h"

namespace weft::testing::cuda_on_host {
namespace {

constexpr unsigned kThreads = 64;

// Each thread passes a number to a neighbour.
void ShiftKernel(bool waits, int distance, int* out) {
  __shared__ int shared[kThreads];
  shared[threadIdx.x] = -1;
  __syncthreads();
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  if (waits) __syncthreads();
  out[threadIdx.x] = shared[(threadIdx.x + kThreads + distance) % kThreads];
}

// Each thread reads a number and then overwrites it. Without the second
// barrier, some threads read the new number.
void OverwriteKernel(bool waits, int* out) {
  __shared__ int shared;
  shared = 1;
  __syncthreads();
  out[threadIdx.x] = shared;
  if (waits) __syncthreads();
  shared = 2;
}

// Only some threads of the block reach the barrier.
void DivergentKernel() {
  if (threadIdx.x < kThreads / 2) __syncthreads();
}

// Only some threads of the block wait for earlier launches.
void EarlyKernel(unsigned waiting_threads) {
  if (threadIdx.x < waiting_threads) cudaGridDependencySynchronize();
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

TEST(CudaOnHostDeathTest, AThreadThatDoesNotWaitForEarlierLaunchesEndsIt) {
  cudaLaunchAttribute early = {};
  cudaLaunchConfig_t config;
  config.blockDim.x = kThreads;
  config.attrs = &early;
  config.numAttrs = 1;
  EXPECT_EQ(cudaLaunchKernelEx(&config, EarlyKernel, kThreads), cudaSuccess);
  EXPECT_DEATH((void)cudaLaunchKernelEx(&config, EarlyKernel, kThreads - 1),
               "a launch that may start early does not wait");
}

// Returns small whole numbers, which are exact in bf16.
float Number(unsigned row, unsigned column) {
  return static_cast<float>((row * 7 + column * 3) % 11) - 5;
}

unsigned Word(float low, float high) {
  return kernels::cuda::PackBf16(low, high);
}

void TransposeKernel(unsigned* transposed) {
  const unsigned g = threadIdx.x / 4;
  const unsigned t = threadIdx.x % 4;
  const unsigned word =
      kernels::cuda::Transpose8x8(Word(Number(g, 2 * t), Number(g, 2 * t + 1)));
  transposed[threadIdx.x] = word;
}

TEST(CudaOnHostTest, TransposesAMatrixOfAWarp) {
  std::vector<unsigned> transposed(32);
  ASSERT_EQ(RunBlock(32, TransposeKernel, transposed.data()), cudaSuccess);
  for (unsigned i = 0; i < 32; ++i) {
    const unsigned row = i / 4;
    const unsigned column = i % 4 * 2;
    EXPECT_EQ(transposed[i], Word(Number(column, row), Number(column + 1, row)))
        << i;
  }
}

TEST(CudaOnHostTest, PacksTwoNumbersToNearest) {
  EXPECT_EQ(kernels::cuda::PackBf16(1.0F, -2.0F), 0xC0003F80U);
  // The first number is a tie and rounds to even. The second is slightly larger
  // and rounds up.
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
  // The count wraps from 34 to 0.
  EXPECT_EQ(count, kThreads - 35);
  for (unsigned i = 0; i < kThreads; ++i) {
    EXPECT_EQ(read[i], i / 32 * 32 + i / 3 % 32);
    EXPECT_EQ(bytes[i], 0x77225500U);
  }
}

using kernels::cuda::ToBf16;

constexpr unsigned kLanes = 32;

// Loads four 8 x 8 matrices. Element 8 r + c of matrix m is 64 m + 8 r + c.
void LoadKernel(bool transposed, unsigned* fragments) {
  alignas(16) __shared__ __nv_bfloat16 shared[4 * 64];
  for (unsigned i = threadIdx.x; i < 4 * 64; i += kLanes) {
    shared[i] = {static_cast<uint16_t>(i)};
  }
  __syncthreads();
  unsigned loaded[4];
  const auto* row = &shared[threadIdx.x * 8];
  if (transposed) {
    kernels::cuda::LoadMatricesTransposed(row, loaded);
  } else {
    kernels::cuda::LoadMatrices(row, loaded);
  }
  std::ranges::copy(loaded, fragments + threadIdx.x * 4);
}

// The expected fragments are those of ldmatrix in the PTX ISA's figures.
TEST(CudaOnHostTest, LoadsMatricesAsDocumented) {
  for (const bool transposed : {false, true}) {
    std::vector<unsigned> fragments(kLanes * 4);
    ASSERT_EQ(RunBlock(kLanes, LoadKernel, transposed, fragments.data()),
              cudaSuccess);
    for (unsigned lane = 0; lane < kLanes; ++lane) {
      for (unsigned m = 0; m < 4; ++m) {
        const unsigned row = lane / 4, column = lane % 4 * 2;
        const unsigned at = transposed ? column * 8 + row : row * 8 + column;
        const unsigned next = at + (transposed ? 8 : 1);
        EXPECT_EQ(fragments[lane * 4 + m], (64 * m + at) | (64 * m + next)
                                                               << 16)
            << "lane " << lane << " matrix " << m;
      }
    }
  }
}

struct Operands {
  std::vector<uint16_t> left;   // [16, 16]
  std::vector<uint16_t> right;  // [16, 8]
  std::vector<float> sums;      // [16, 8]
};

// Takes and returns fragments element by element, as the PTX ISA's figures of
// mma.m16n8k16 number them: a0 to a7, b0 to b3 and c0 to c3.
void MultiplyKernel(Operands* o) {
  const unsigned group = threadIdx.x / 4, in_group = threadIdx.x % 4;
  unsigned left[4] = {}, right[2] = {};
  for (unsigned i = 0; i < 8; ++i) {
    const unsigned row = i % 4 < 2 ? group : group + 8;
    const unsigned column = in_group * 2 + (i & 1) + (i < 4 ? 0 : 8);
    left[i / 2] |= static_cast<unsigned>(o->left[row * 16 + column])
                   << 16 * (i % 2);
  }
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned row = in_group * 2 + (i & 1) + (i < 2 ? 0 : 8);
    right[i / 2] |= static_cast<unsigned>(o->right[row * 8 + group])
                    << 16 * (i % 2);
  }
  float sums[4];
  const auto at = [&](unsigned i) -> float& {
    const unsigned row = i < 2 ? group : group + 8;
    return o->sums[row * 8 + in_group * 2 + (i & 1)];
  };
  for (unsigned i = 0; i < 4; ++i) sums[i] = at(i);
  kernels::cuda::MultiplyAdd(left, right, sums);
  for (unsigned i = 0; i < 4; ++i) at(i) = sums[i];
}

TEST(CudaOnHostTest, MultipliesFragmentsAsDocumented) {
  Operands o = {.left = std::vector<uint16_t>(16 * 16),
                .right = std::vector<uint16_t>(16 * 8),
                .sums = std::vector<float>(16 * 8)};
  std::iota(o.sums.begin(), o.sums.end(), 0.0F);
  std::vector<float> expected = o.sums;
  const auto left = [](unsigned i, unsigned k) {
    return static_cast<float>(i * 16 + k) - 100;
  };
  const auto right = [](unsigned k, unsigned j) {
    return static_cast<float>(k * 8 + j) - 50;
  };
  for (unsigned k = 0; k < 16; ++k) {
    for (unsigned i = 0; i < 16; ++i) o.left[i * 16 + k] = ToBf16(left(i, k));
    for (unsigned j = 0; j < 8; ++j) o.right[k * 8 + j] = ToBf16(right(k, j));
    for (unsigned i = 0; i < 16; ++i) {
      for (unsigned j = 0; j < 8; ++j) {
        expected[i * 8 + j] += left(i, k) * right(k, j);
      }
    }
  }
  // All sums are exact, because they are of whole numbers.
  ASSERT_EQ(RunBlock(kLanes, MultiplyKernel, &o), cudaSuccess);
  EXPECT_EQ(o.sums, expected);
}

// Starts two groups of copies, and waits for none, one or both of them.
void CopyKernel(int num_waited, const uint16_t* from, uint16_t* out) {
  auto* shared = static_cast<uint16_t*>(kernels::cuda::DynamicShared());
  if (threadIdx.x != 0) return;
  std::fill_n(shared, 16, uint16_t{99});
  kernels::cuda::CopyAsync(from, 16, shared);
  kernels::cuda::EndCopyGroup();
  kernels::cuda::CopyAsync(from, 6, shared + 8);
  kernels::cuda::EndCopyGroup();
  if (num_waited == 1) kernels::cuda::WaitForCopies<1>();
  if (num_waited == 2) kernels::cuda::WaitForCopies<0>();
  std::copy_n(shared, 16, out);
}

TEST(CudaOnHostTest, CopiesAreThereWhenWaitedForAndNotBefore) {
  alignas(16) const uint16_t from[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  for (const int num_waited : {0, 1, 2}) {
    std::vector<uint16_t> out(16), expected(16, 99);
    cudaLaunchConfig_t config;
    config.blockDim.x = kLanes;
    config.dynamicSmemBytes = 32;
    ASSERT_EQ(
        cudaLaunchKernelEx(&config, CopyKernel, num_waited, from, out.data()),
        cudaSuccess);
    if (num_waited >= 1) std::ranges::copy(from, expected.begin());
    if (num_waited >= 2) {
      std::fill(expected.begin() + 8, expected.end(), uint16_t{0});
      std::copy_n(from, 3, expected.begin() + 8);
    }
    EXPECT_EQ(out, expected);
  }
}

// Reads and writes four numbers at once.
void CopyPackKernel(const float* from, float* to) {
  kernels::cuda::StorePack(kernels::cuda::LoadPack<4>(from), to);
}

// Like CopyPackKernel, but two numbers at once, which takes 8 bytes.
void CopyPairKernel(const float* from, float* to) {
  kernels::cuda::StorePack(kernels::cuda::LoadPack<2>(from), to);
}

TEST(CudaOnHostDeathTest, AnAccessBetweenMultiplesOfItsSizeEndsTheProcess) {
#ifdef __clang__
  GTEST_SKIP() << "copies of classes have no checks";
#endif
  alignas(16) float from[8] = {1, 2, 3, 4, 5};
  alignas(16) float to[8];
  EXPECT_EQ(RunBlock(kLanes, CopyPackKernel, from, to), cudaSuccess);
  EXPECT_EQ(to[3], 4);
  EXPECT_EQ(RunBlock(kLanes, CopyPairKernel, from + 2, to), cudaSuccess);
  EXPECT_EQ(to[1], 4);
  const char* const message = "misaligned address";
  EXPECT_DEATH((void)RunBlock(kLanes, CopyPackKernel, from + 1, to), message);
  EXPECT_DEATH((void)RunBlock(kLanes, CopyPackKernel, from, to + 2), message);
  EXPECT_DEATH((void)RunBlock(kLanes, CopyPairKernel, from + 1, to), message);
  EXPECT_DEATH((void)RunBlock(kLanes, CopyPairKernel, from, to + 3), message);
}

template <int kMost>
void __launch_bounds__(kMost, 2) BoundKernel(int* num_threads) {
  *num_threads = static_cast<int>(blockDim.x);
}

TEST(CudaOnHostTest, RefusesMoreThreadsThanTheLaunchBounds) {
#ifdef __clang__
  GTEST_SKIP() << "kernels have no bounds";
#endif
  int num_threads = 0;
  EXPECT_EQ(RunBlock(96, BoundKernel<96>, &num_threads), cudaSuccess);
  EXPECT_EQ(num_threads, 96);
  EXPECT_EQ(RunBlock(128, BoundKernel<96>, &num_threads),
            cudaErrorLaunchOutOfResources);
  EXPECT_EQ(RunBlock(1024, BoundKernel<1024>, &num_threads), cudaSuccess);
}

TEST(CudaOnHostTest, RefusesMoreSharedMemoryThanTheDeviceAndTheKernelHave) {
  constexpr int kDefault = 48 << 10, kAda = 99 << 10;
  const auto launch = [](int num_bytes) {
    int num_threads = 0;
    cudaLaunchConfig_t config;
    config.blockDim.x = kLanes;
    config.dynamicSmemBytes = static_cast<size_t>(num_bytes);
    return cudaLaunchKernelEx(&config, BoundKernel<32>, &num_threads);
  };
  const auto raise = [](int num_bytes) {
    return cudaFuncSetAttribute(BoundKernel<32>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                num_bytes);
  };
  EXPECT_EQ(launch(kDefault), cudaSuccess);
  EXPECT_EQ(launch(kDefault + 1), cudaErrorInvalidValue);
  EXPECT_EQ(raise(kSharedBytesOfHopper + 1), cudaErrorInvalidValue);
  EXPECT_EQ(raise(kAda + 1), cudaSuccess);
  EXPECT_EQ(launch(kAda + 1), cudaSuccess);
  EXPECT_EQ(launch(kAda + 2), cudaErrorInvalidValue);
  max_shared_bytes = kAda;
  EXPECT_EQ(launch(kAda + 1), cudaErrorInvalidValue);
  EXPECT_EQ(raise(kAda + 1), cudaErrorInvalidValue);
  EXPECT_EQ(launch(kAda), cudaSuccess);
  max_shared_bytes = kSharedBytesOfHopper;
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
