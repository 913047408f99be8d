// Changes logits on the device, before tokens are drawn from them.
// Legend: N rows with changes, V vocabulary.
#ifndef WEFT_KERNELS_CUDA_LOGIT_EDITS_H_
#define WEFT_KERNELS_CUDA_LOGIT_EDITS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::kernels::cuda {

// The change of one token's logit (sampling::LogitEdit), which is one load.
struct alignas(16) TokenEdit {
  int32_t token = 0;
  float bias = 0;
  float repetition = 1;
  float penalty = 0;
};

// A new value for an entry of a list of edits.
struct EditUpdate {
  int32_t place = 0;
  TokenEdit edit;
};

// The changes of one row. All pointers are device pointers.
struct EditedRow {
  int64_t row = 0;
  const TokenEdit* shared = nullptr;  // Of distinct tokens.
  TokenEdit* own = nullptr;          // Of distinct tokens. Made after `shared`.
  const uint32_t* banned = nullptr;  // A bit for each token; null bans none.
  int32_t num_shared = 0;
  int32_t num_own = 0;
  // The updates [first_update, first_update + num_updates) are written to `own`
  // before the row is changed.
  int32_t first_update = 0;
  int32_t num_updates = 0;
};

struct LogitEdits {
  int64_t num_rows = 0;  // N. Their rows and their `own` lists are distinct.
  int64_t vocab = 0;     // V.
  float* logits_RV = nullptr;
  const EditedRow* rows_N = nullptr;    // Aligned to 16.
  const EditUpdate* updates = nullptr;  // Aligned to 16.
};

// Changes the rows in place, with the bits of sampling::EditRows on a CPU. Then
// the logits of banned tokens are -inf.
// Units:   one launch, in which a block reads the lists of a row, and the V / 8
// bytes of its banned tokens.
// Errors:  those of the launch.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
[[nodiscard]] cudaError_t EditLogits(const LogitEdits& edits,
                                     cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LOGIT_EDITS_H_
