// The tensor cores' product of a warp: m16n8k16, bf16 with f32 sums. On the
// host tests/support/cuda_on_host has it.
//
// Of lane 4 g + t, with g in [0, 8) and t in [0, 4), two elements a register:
//   a[0] (g, 2t..), a[1] (g + 8, 2t..), a[2] (g, 2t + 8..), a[3] (g + 8, 2t +
//   8..); b[0] (2t.., g), b[1] (2t + 8.., g); sums (g, 2t), (g, 2t + 1), (g +
//   8, 2t), (g + 8, 2t + 1).
#ifndef WEFT_KERNELS_CUDA_WARP_MMA_CUH_
#define WEFT_KERNELS_CUDA_WARP_MMA_CUH_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#ifdef __CUDACC__

namespace weft::kernels::cuda {

// sums += a b. All lanes call it.
__device__ inline void WarpMma(float (&sums)[4], const unsigned (&a)[4],
                               const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace weft::kernels::cuda

#else

#include "warp_mma.h"

#endif

#endif  // WEFT_KERNELS_CUDA_WARP_MMA_CUH_
