// What tensor cores do with the registers of one warp, as functions. All lanes
// call them together. Lane 4 g + t holds of a matrix of bf16, two neighbours of
// a row in a word (the first in its lower half), and of one of f32:
//
//   a [16, 16]: words (g, 2 t), (g + 8, 2 t), (g, 2 t + 8), (g + 8, 2 t + 8)
//   b [16, 8]:  by columns: words (2 t, g), (2 t + 8, g)
//   d [16, 8]:  (g, 2 t), (g, 2 t + 1), (g + 8, 2 t), (g + 8, 2 t + 1)
//   an 8 x 8:   word (g, 2 t)
#ifndef WEFT_KERNELS_CUDA_WARP_MATRIX_CUH_
#define WEFT_KERNELS_CUDA_WARP_MATRIX_CUH_

#ifdef __CUDACC__

namespace weft::kernels::cuda {

// d += a b.
__device__ inline void MultiplyAdd(const unsigned (&a)[4],
                                   const unsigned (&b)[2], float (&d)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The lane's word of the transposed 8 x 8 matrix.
__device__ inline unsigned Transpose8x8(unsigned word) {
  unsigned transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
               : "=r"(transposed)
               : "r"(word));
  return transposed;
}

// Two numbers as bf16, rounded to nearest, in one word.
__device__ inline unsigned PackBf16(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

}  // namespace weft::kernels::cuda

#else
#include <warp_matrix_on_host.h>
#endif

#endif  // WEFT_KERNELS_CUDA_WARP_MATRIX_CUH_
