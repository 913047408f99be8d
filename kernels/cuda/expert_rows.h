// The rows of a mixture of experts: sorts them by expert, adds up the results
// of a token, and keeps the experts of tokens in the cache. The host need not
// know which experts a token has.
// Legend: T tokens, K experts per token, E experts, N = T K rows, S slots, H
// features of a row.
#ifndef WEFT_KERNELS_CUDA_EXPERT_ROWS_H_
#define WEFT_KERNELS_CUDA_EXPERT_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// A sort by expert. All pointers are device pointers to contiguous memory.
struct ExpertSort {
  const int64_t* experts_TK = nullptr;  // Each in [0, E).
  int64_t num_rows = 0;                 // N.
  int64_t per_token = 1;                // K.
  int64_t num_experts = 0;              // E.
  // The results: each row's token, its index in experts_TK, the row of each
  // entry of experts_TK, and where each expert's rows end.
  int64_t* tokens_N = nullptr;
  int64_t* pairs_N = nullptr;
  int64_t* places_TK = nullptr;
  int32_t* ends_E = nullptr;
};

// Sorts the rows by expert, and the rows of an expert by their index in
// experts_TK, in one launch. The grid depends only on num_experts.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  SortByExpert of src/model/router.h on a CPU.
[[nodiscard]] cudaError_t SortByExpert(const ExpertSort& sort,
                                       cudaStream_t stream);

// The sums over the experts of each token.
struct ExpertSums {
  DType dtype = DType::kF32;  // Of rows_NH and sums_TH, which are contiguous.
  int64_t num_tokens = 0;
  int64_t per_token = 1;
  int64_t features = 0;                // H.
  const int64_t* places_TK = nullptr;  // The rows of each token.
  const void* rows_NH = nullptr;
  void* sums_TH = nullptr;
};

// Adds up the rows of each token in the order of places_TK, in f32, in one
// launch. A sum depends only on its rows.
[[nodiscard]] cudaError_t SumExpertRows(const ExpertSums& sums,
                                        cudaStream_t stream);

// Experts to keep in the cache.
struct ExpertColumns {
  const int64_t* experts_TK = nullptr;
  int64_t num_tokens = 0;
  int64_t per_token = 1;
  const int64_t* slots_T = nullptr;
  int16_t* experts_SW = nullptr;  // Contiguous.
  int64_t width = 0;              // W.
  int64_t column = 0;             // The first of K columns.
};

// Writes each token's experts to its slot, in K columns. Skips the tokens whose
// slot is negative.
[[nodiscard]] cudaError_t KeepExperts(const ExpertColumns& experts,
                                      cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_EXPERT_ROWS_H_
