// kernels/cuda/warp_mma.cuh on the host.
#ifndef WEFT_TESTS_SUPPORT_CUDA_ON_HOST_WARP_MMA_H_
#define WEFT_TESTS_SUPPORT_CUDA_ON_HOST_WARP_MMA_H_

#include <bit>
#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"

namespace weft::kernels::cuda {

// Elements 2 i and 2 i + 1 are in the lower and the upper half of a register.
inline float HalfOf(unsigned pair, int half) {
  return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xFFFF0000U);
}

inline void WarpMma(float (&sums)[4], const unsigned (&a)[4],
                    const unsigned (&b)[2]) {
  namespace host = weft::testing::cuda_on_host;
  constexpr unsigned kLanes = 4;  // That have a row of a, a column of b.
  const unsigned lane = threadIdx.x % 32;
  unsigned rows[kLanes][4];
  unsigned columns[2][kLanes][2];
  unsigned which = host::NextSlot();
  std::memcpy(host::LaneSlot(lane, which), a, sizeof a);
  __syncwarp();
  for (unsigned i = 0; i < kLanes; ++i) {
    std::memcpy(rows[i], host::LaneSlot(lane / kLanes * kLanes + i, which),
                sizeof rows[i]);
  }
  which = host::NextSlot();
  std::memcpy(host::LaneSlot(lane, which), b, sizeof b);
  __syncwarp();
  for (unsigned column = 0; column < 2; ++column) {
    const unsigned first = (lane % kLanes * 2 + column) * kLanes;
    for (unsigned i = 0; i < kLanes; ++i) {
      std::memcpy(columns[column][i], host::LaneSlot(first + i, which),
                  sizeof columns[column][i]);
    }
  }
  for (unsigned s = 0; s < 4; ++s) {
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned half = k % 2, owner = k / 2 % kLanes, upper = k / 8;
      sums[s] += HalfOf(rows[owner][2 * upper + s / 2], half) *
                 HalfOf(columns[s % 2][owner][upper], half);
    }
  }
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_WARP_MMA_H_
