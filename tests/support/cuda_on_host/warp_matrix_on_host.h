// kernels/cuda/warp_matrix.cuh on the host; see cuda_runtime_api.h.
#ifndef WEFT_TESTS_SUPPORT_CUDA_ON_HOST_WARP_MATRIX_ON_HOST_H_
#define WEFT_TESTS_SUPPORT_CUDA_ON_HOST_WARP_MATRIX_ON_HOST_H_

#include <cstdint>
#include <cstring>

#include "cuda_bf16.h"
#include "cuda_runtime.h"

namespace weft::testing::cuda_on_host {

// A number in the lower (0) or upper (1) half of a word.
inline float HalfOf(unsigned word, unsigned half) {
  return __bfloat162float({static_cast<uint16_t>(word >> 16 * half)});
}

// What each lane of a warp gave. It holds until the lane's next exchange.
template <typename T>
class Exchanged {
 public:
  explicit Exchanged(const T& mine) : which_(NextSlot()) {
    static_assert(sizeof(T) <= 16);
    std::memcpy(LaneSlot(threadIdx.x % 32, which_), &mine, sizeof(T));
    __syncwarp();
  }
  [[nodiscard]] T Of(unsigned lane) const {
    T value;
    std::memcpy(&value, LaneSlot(lane, which_), sizeof(T));
    return value;
  }

 private:
  unsigned which_;
};

}  // namespace weft::testing::cuda_on_host

namespace weft::kernels::cuda {

// Sums in f32, one product after the other; a device's order is not known.
inline void MultiplyAdd(const unsigned (&a)[4], const unsigned (&b)[2],
                        float (&d)[4]) {
  namespace host = weft::testing::cuda_on_host;
  struct A {
    unsigned words[4];
  };
  struct B {
    unsigned words[2];
  };
  const host::Exchanged<A> all_a(A{{a[0], a[1], a[2], a[3]}});
  const unsigned row = threadIdx.x % 32 / 4;
  const unsigned column = threadIdx.x % 4 * 2;
  A rows[4];
  for (unsigned t = 0; t < 4; ++t) rows[t] = all_a.Of(4 * row + t);
  const host::Exchanged<B> all_b(B{{b[0], b[1]}});
  for (unsigned t = 0; t < 4; ++t) {
    for (unsigned j = 0; j < 2; ++j) {
      const B columns = all_b.Of(4 * (column + j) + t);
      for (unsigned i = 0; i < 4; ++i) {
        for (unsigned half = 0; half < 2; ++half) {
          d[2 * (i % 2) + j] += host::HalfOf(rows[t].words[i], half) *
                                host::HalfOf(columns.words[i / 2], half);
        }
      }
    }
  }
}

inline unsigned Transpose8x8(unsigned word) {
  namespace host = weft::testing::cuda_on_host;
  const host::Exchanged<unsigned> all(word);
  const unsigned row = threadIdx.x % 32 / 4;
  const unsigned column = threadIdx.x % 4 * 2;
  const auto element = [&](unsigned i, unsigned j) {
    return all.Of(4 * i + j / 2) >> 16 * (j % 2) & 0xFFFF;
  };
  return element(column, row) | element(column + 1, row) << 16;
}

inline unsigned PackBf16(float low, float high) {
  return __float2bfloat16_rn(low).bits |
         static_cast<unsigned>(__float2bfloat16_rn(high).bits) << 16;
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_WARP_MATRIX_ON_HOST_H_
