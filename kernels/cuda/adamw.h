// The AdamW update, and the sum of squares that gradient clipping needs, over
// flat f32 buffers.
// Legend: N elements.
#ifndef WEFT_KERNELS_CUDA_ADAMW_H_
#define WEFT_KERNELS_CUDA_ADAMW_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cuda {

// Applies one AdamW step to `count` elements: writes the new weights to
// weights_out, and updates the moments in place. weights_out may equal weights.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source: reference::AdamW.
[[nodiscard]] cudaError_t AdamW(const cpu::AdamWScalars& scalars, int64_t count,
                                const float* weights_N, const float* gradient_N,
                                float* moment1_N, float* moment2_N,
                                float* weights_out_N, cudaStream_t stream);

// Returns the number of doubles that SumOfSquares needs as workspace for
// `count` elements.
int64_t SumOfSquaresPartials(int64_t count);

// Writes the sum of x^2 in f64 to partials[0]. `partials` is a device buffer of
// SumOfSquaresPartials(count) doubles. The order of the additions depends only
// on `count`.
[[nodiscard]] cudaError_t SumOfSquares(const float* x_N, int64_t count,
                                       double* partials, cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_ADAMW_H_
