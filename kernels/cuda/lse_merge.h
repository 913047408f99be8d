// Merges attention results over disjoint sets of keys.
// Legend: N rows (each is one head of one token), C head features.
#ifndef WEFT_KERNELS_CUDA_LSE_MERGE_H_
#define WEFT_KERNELS_CUDA_LSE_MERGE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// Merges `part` into `out`. A row's lse is the logarithm of the sum of e^score
// over its keys. Computes for each row:
//
//   l = log(e^lse + e^part_lse)
//   out = out e^(lse - l) + part e^(part_lse - l)
//   lse = l
// A part with lse -inf has no keys and changes nothing.
// Shapes:  part, out [N, C] contiguous, of `dtype`; part_lse, lse [N] f32.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  lse_merge_rows of kernels/cpu/kernels.h.
[[nodiscard]] cudaError_t LseMergeRows(DType dtype, int64_t num_rows,
                                       int64_t head_features,
                                       const void* part_NC,
                                       const float* part_lse_N, void* out_NC,
                                       float* lse_N, cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LSE_MERGE_H_
