// Reads matrices of experts that a checkpoint has transposed, with the rows of
// two matrices in turns, or in 4 bits. Private to src/model.
#ifndef WEFT_SRC_MODEL_PACKED_WEIGHTS_H_
#define WEFT_SRC_MODEL_PACKED_WEIGHTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "src/model_config/weight_list.h"
#include "src/weights/checkpoint.h"

namespace weft::model {

// An entry whose place is not StoredForm::kRows. `entry` outlives it.
struct PackedEntry {
  const WeightEntry* entry;
  StoredPlace place;
  // [rows] or [rows, columns], the rank's part, which may be in 8 bits.
  at::Tensor destination;
};

// Returns the bytes that ReadPacked reads.
[[nodiscard]] int64_t PackedBytes(const weights::Checkpoint& checkpoint,
                                  const std::vector<PackedEntry>& entries);

// Fills the destinations on all compute threads. Neighbours in the list that
// have the same expert's matrix are read together. A thread holds one matrix of
// one expert beside the destinations. Calls `on_read` with the bytes of each
// matrix, on any thread. REQUIRES: CheckStored accepts all tensors. Errors:
// those of DiskTensor::Read, weights::WidenMxfp4 and StoreRows.
[[nodiscard]] absl::Status ReadPacked(
    const weights::Checkpoint& checkpoint,
    const std::vector<PackedEntry>& entries,
    const std::function<void(int64_t)>& on_read);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_PACKED_WEIGHTS_H_
