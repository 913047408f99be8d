// Functions for tensor cores, asynchronous copies and shared memory. Most of
// them wrap one instruction of PTX. The PTX ISA describes the instructions and
// the layouts of their fragments. All lanes of a warp call LoadMatrices,
// LoadMatricesTransposed, MultiplyAdd and Transpose8x8 together. Tests on the
// host use ptx_on_host.h instead.
//
// Legend: lane l has g = l / 4 and t = l % 4.
#ifndef WEFT_KERNELS_CUDA_MMA_CUH_
#define WEFT_KERNELS_CUDA_MMA_CUH_

#include "kernels/cuda/device.cuh"

#ifndef __CUDACC__
#include <ptx_on_host.h>
#else

namespace weft::kernels::cuda {

__device__ inline unsigned SharedAddress(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// Loads four 8 x 8 matrices of bf16 from shared memory. Lane l passes the
// address of row l % 8 of matrix l / 8. The address is a multiple of 16. Each
// lane gets elements (g, 2t) and (g, 2t + 1) of each matrix.
__device__ inline void LoadMatrices(const __nv_bfloat16* row,
                                    unsigned (&fragments)[4]) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]),
        "=r"(fragments[3])
      : "r"(SharedAddress(row))
      : "memory");
}

// Loads four matrices like LoadMatrices, but transposed: each lane gets
// elements (2t, g) and (2t + 1, g).
__device__ inline void LoadMatricesTransposed(const __nv_bfloat16* row,
                                              unsigned (&fragments)[4]) {
  asm volatile(
      "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(fragments[0]), "=r"(fragments[1]), "=r"(fragments[2]),
        "=r"(fragments[3])
      : "r"(SharedAddress(row))
      : "memory");
}

// Computes sums [16, 8] += left [16, 16] right [16, 8], with f32 sums of bf16.
// Each lane holds the elements
//
//   left   (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8)
//   right  (2t, g), (2t + 8, g)
//   sums   (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// Each word of left or right also holds, in its upper half, the next element
// along the depth.
__device__ inline void MultiplyAdd(const unsigned (&left)[4],
                                   const unsigned (&right)[2],
                                   float (&sums)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]),
        "r"(right[1]));
}

// Transposes an 8 x 8 matrix of bf16. `word` holds the lane's elements (g, 2t)
// and (g, 2t + 1). Returns the same elements of the transposed matrix. All
// lanes call it together.
__device__ inline unsigned Transpose8x8(unsigned word) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(transposed)
               : "r"(word));
  return transposed;
}

// Returns two numbers as bf16, rounded to nearest, in one word. `low` is in the
// lower half.
__device__ inline unsigned PackBf16(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// Returns the differences a - b of two pairs of bf16, rounded to nearest.
__device__ inline unsigned SubtractBf16Pairs(unsigned a, unsigned b) {
  constexpr unsigned kMinusOnes = 0xBF80BF80;
  unsigned differences;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"
      : "=r"(differences)
      : "r"(b), "r"(kMinusOnes), "r"(a));
  return differences;
}

// Starts a copy of 16 bytes to shared memory. Reads only the first `num_bytes`
// bytes; the others become 0. Both addresses are multiples of 16.
__device__ inline void CopyAsync(const void* from, int num_bytes,
                                 void* shared) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(SharedAddress(shared)), "l"(from), "r"(num_bytes)
               : "memory");
}

// Ends a group of copies. The group has all copies that the thread has started
// since its last call of EndCopyGroup.
__device__ inline void EndCopyGroup() {
  asm volatile("cp.async.commit_group;" : : : "memory");
}

// Waits until all of the thread's groups of copies are complete, except the
// last kPending. Other threads see the data after a barrier.
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// Prefetches the cache line at `global` into the L2 cache.
__device__ inline void Prefetch(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(global));
}

// Returns the launch's dynamic shared memory.
__device__ inline void* DynamicShared() {
  extern __shared__ uint4 dynamic_shared[];
  return dynamic_shared;
}

}  // namespace weft::kernels::cuda

#endif  // __CUDACC__

#endif  // WEFT_KERNELS_CUDA_MMA_CUH_
