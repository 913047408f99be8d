// Lists the likeliest tokens of rows of logits on the device.
// Legend: N lists, M rows of logits, V vocabulary.
#ifndef WEFT_KERNELS_CUDA_TOKEN_LISTS_H_
#define WEFT_KERNELS_CUDA_TOKEN_LISTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::kernels::cuda {

struct TokenList {
  int32_t row = 0;    // The row of the logits.
  int32_t size = 0;   // How many tokens to list, from 1 to V.
  int64_t begin = 0;  // The place of the first in TokenLists' results.
};

// All pointers are device pointers.
struct TokenLists {
  int64_t num_lists = 0;  // N.
  int64_t vocab = 0;      // V.
  const float* logits_MV = nullptr;
  int64_t row_stride = 0;
  const TokenList* lists_N = nullptr;
  // The results of all lists. Their places do not overlap.
  int32_t* tokens = nullptr;
  float* logits = nullptr;
};

// Lists the likeliest tokens of each row, and of equal logits those with the
// lowest ids. A list is in the order of ids. If the row has a NaN, the list has
// some tokens of the row.
// Units:   one launch, in which a block passes over a row five times.
// Errors:  those of the launch.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
[[nodiscard]] cudaError_t ListTokens(const TokenLists& lists,
                                     cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_TOKEN_LISTS_H_
