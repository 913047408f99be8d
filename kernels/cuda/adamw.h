// AdamW and the sum that clipping needs, over flat f32 buffers.
// Legend: N elements.
#ifndef WEFT_KERNELS_CUDA_ADAMW_H_
#define WEFT_KERNELS_CUDA_ADAMW_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cpu/kernels.h"

namespace weft::kernels::cuda {

// One pass over [N]: moments in place, weights_out may be weights.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  reference::AdamW.
[[nodiscard]] cudaError_t AdamW(const cpu::AdamWScalars& scalars, int64_t count,
                                const float* weights_N, const float* gradient_N,
                                float* moment1_N, float* moment2_N,
                                float* weights_out_N, cudaStream_t stream);

// Doubles of workspace that SumOfSquares takes for `count` elements, >= 1.
[[nodiscard]] int64_t SumOfSquaresPartials(int64_t count);

// Writes the sum of x^2 in f64 to partials[0], a device buffer of
// SumOfSquaresPartials(count). The order of the sum depends on `count` alone.
[[nodiscard]] cudaError_t SumOfSquares(const float* x_N, int64_t count,
                                       double* partials, cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_ADAMW_H_
