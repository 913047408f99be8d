// Philox4x32-10, a counter-based random number generator. A number depends only
// on a counter and a key.
#ifndef WEFT_SRC_SAMPLING_PHILOX_H_
#define WEFT_SRC_SAMPLING_PHILOX_H_

#include <array>
#include <cstdint>

namespace weft::sampling {

// Returns 128 random bits. Threads: any. Source: Salmon et al. 2011, "Parallel
// random numbers: as easy as 1, 2, 3".
[[nodiscard]] std::array<uint32_t, 4> Philox4x32(
    std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_PHILOX_H_
