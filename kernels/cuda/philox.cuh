// Philox4x32-10, with the same bits as src/sampling/sampler.h.
#ifndef WEFT_KERNELS_CUDA_PHILOX_CUH_
#define WEFT_KERNELS_CUDA_PHILOX_CUH_

#include "kernels/cuda/device.cuh"

namespace weft::kernels::cuda {

// Returns the upper 24 bits of the first 32-bit output for the key `seed` and
// the counter (sample_index, position, 0, 0). This is 2^24 times the number
// that sampling::CounterUniform returns. Source: Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3".
__device__ inline uint32_t Philox24(uint64_t seed, uint32_t sample_index,
                                    uint32_t position) {
  constexpr int kRounds = 10;
  constexpr uint64_t kMultiplier0 = 0xD2511F53;
  constexpr uint64_t kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9;
  constexpr uint32_t kWeyl1 = 0xBB67AE85;
  uint32_t counter[4] = {sample_index, position, 0, 0};
  auto key0 = static_cast<uint32_t>(seed);
  auto key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t product0 = kMultiplier0 * counter[0];
    const uint64_t product1 = kMultiplier1 * counter[2];
    counter[0] = static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key0;
    counter[1] = static_cast<uint32_t>(product1);
    counter[2] = static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key1;
    counter[3] = static_cast<uint32_t>(product0);
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return counter[0] >> 8;
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PHILOX_CUH_
