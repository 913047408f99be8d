// The instructions of kernels/cuda/mma.cuh on the host, with the fragments'
// layouts that the PTX ISA states; see cuda_runtime_api.h. An asynchronous copy
// happens when its thread waits for it, so that tests detect earlier reads.
#ifndef WEFT_TESTS_SUPPORT_CUDA_ON_HOST_PTX_ON_HOST_H_
#define WEFT_TESTS_SUPPORT_CUDA_ON_HOST_PTX_ON_HOST_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cuda_bf16.h"
#include "cuda_runtime.h"

namespace weft::testing::cuda_on_host {

// Queues a copy, which happens when the thread waits for it. Bytes of `to`
// beyond num_bytes become 0.
void CopyLater(const void* from, int num_bytes, void* to, int to_bytes);
void EndCopyGroup();
void WaitForCopies(size_t num_pending);
// Returns the dynamic shared memory of the running launch.
void* DynamicShared();

// A device accepts only addresses that are multiples of num_bytes.
inline void CheckAlignment(const void* address, int num_bytes) {
  if (reinterpret_cast<uintptr_t>(address) % num_bytes == 0) return;
  std::fprintf(stderr, "cuda_on_host: %p is no multiple of %d\n", address,
               num_bytes);
  std::abort();
}

// Gives each lane its elements of four 8 x 8 matrices. Each lane passes the
// address of one row.
inline void LoadMatrices(const __nv_bfloat16* row, bool transposed,
                         unsigned (&fragments)[4]) {
  CheckAlignment(row, 16);
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned which = NextSlot();
  char* slots = static_cast<char*>(LaneSlot(0, which));
  std::memcpy(slots + lane * kSlotBytes, &row, sizeof(row));
  __syncwarp();
  const auto bits = [&](unsigned matrix, unsigned i, unsigned j) {
    const __nv_bfloat16* elements;
    std::memcpy(&elements, slots + (matrix * 8 + i) * kSlotBytes,
                sizeof(elements));
    return static_cast<unsigned>(elements[j].bits);
  };
  for (unsigned m = 0; m < 4; ++m) {
    const unsigned low = transposed ? bits(m, 2 * t, g) : bits(m, g, 2 * t);
    const unsigned high =
        transposed ? bits(m, 2 * t + 1, g) : bits(m, g, 2 * t + 1);
    fragments[m] = low | high << 16;
  }
}

}  // namespace weft::testing::cuda_on_host

namespace weft::kernels::cuda {

inline void LoadMatrices(const __nv_bfloat16* row, unsigned (&fragments)[4]) {
  weft::testing::cuda_on_host::LoadMatrices(row, false, fragments);
}
inline void LoadMatricesTransposed(const __nv_bfloat16* row,
                                   unsigned (&fragments)[4]) {
  weft::testing::cuda_on_host::LoadMatrices(row, true, fragments);
}

inline void MultiplyAdd(const unsigned (&left)[4], const unsigned (&right)[2],
                        float (&sums)[4]) {
  namespace host = weft::testing::cuda_on_host;
  struct Fragments {
    unsigned left[4];
    unsigned right[2];
    unsigned unused[2];
  };
  static_assert(sizeof(Fragments) == host::kSlotBytes);
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto* lanes = static_cast<Fragments*>(host::LaneSlot(0, host::NextSlot()));
  std::memcpy(lanes[lane].left, left, sizeof(left));
  std::memcpy(lanes[lane].right, right, sizeof(right));
  __syncwarp();
  const auto part = [](unsigned pair, unsigned k) {
    return __bfloat162float({static_cast<uint16_t>(pair >> 16 * (k % 2))});
  };
  float rows[2][16], columns[2][16];
  for (unsigned k = 0; k < 16; ++k) {
    const unsigned half = k / 8, of_t = k % 8 / 2;
    for (unsigned i = 0; i < 2; ++i) {
      rows[i][k] = part(lanes[g * 4 + of_t].left[2 * half + i], k);
      columns[i][k] = part(lanes[(2 * t + i) * 4 + of_t].right[half], k);
    }
  }
  for (unsigned k = 0; k < 16; ++k) {
    for (unsigned i = 0; i < 4; ++i) {
      sums[i] += rows[i / 2][k] * columns[i % 2][k];
    }
  }
}

inline unsigned Transpose8x8(unsigned word) {
  const unsigned lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
  const auto element = [&](unsigned all, unsigned j) {
    return all >> 16 * (j % 2) & 0xFFFF;
  };
  // Row `column` of the matrix gives the lower half of the result, and the next
  // row gives the upper half.
  const unsigned low =
      weft::testing::cuda_on_host::ReadLane(word, 4 * column + row / 2);
  const unsigned high =
      weft::testing::cuda_on_host::ReadLane(word, 4 * (column + 1) + row / 2);
  return element(low, row) | element(high, row) << 16;
}

inline unsigned PackBf16(float low, float high) {
  return __float2bfloat16_rn(low).bits |
         static_cast<unsigned>(__float2bfloat16_rn(high).bits) << 16;
}

inline unsigned SubtractBf16Pairs(unsigned a, unsigned b) {
  const auto difference = [&](unsigned shift) {
    return __bfloat162float({static_cast<uint16_t>(a >> shift)}) -
           __bfloat162float({static_cast<uint16_t>(b >> shift)});
  };
  return PackBf16(difference(0), difference(16));
}

inline void CopyAsync(const void* from, int num_bytes, void* shared) {
  weft::testing::cuda_on_host::CopyLater(from, num_bytes, shared, 16);
}
inline void EndCopyGroup() { weft::testing::cuda_on_host::EndCopyGroup(); }
template <int kPending>
void WaitForCopies() {
  weft::testing::cuda_on_host::WaitForCopies(kPending);
}
inline void Prefetch(const void* /*global*/) {}
inline void* DynamicShared() {
  return weft::testing::cuda_on_host::DynamicShared();
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_PTX_ON_HOST_H_
