// Reads matrices of experts that a checkpoint stores transposed, in 4 bits, or
// with alternating rows of two matrices. Private to src/model.
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

// An entry whose stored form is not StoredForm::kRows. `entry` outlives it.
struct PackedEntry {
  const WeightEntry* entry;
  StoredPlace place;
  // The rank's part, [rows] or [rows, columns], which may be in 8 bits.
  at::Tensor destination;
};

// Returns the number of bytes that ReadPacked reads.
[[nodiscard]] int64_t PackedBytes(const weights::Checkpoint& checkpoint,
                                  const std::vector<PackedEntry>& entries);

// Fills the destinations on all compute threads. If adjacent entries need the
// same matrix of an expert, reads it once. A thread holds one expert's matrix
// at a time. After each matrix, calls `on_read` on any thread, with the number
// of bytes read.
// REQUIRES: CheckStored accepts all tensors. Errors: those of DiskTensor::Read,
// weights::WidenMxfp4 and StoreRows.
[[nodiscard]] absl::Status ReadPacked(
    const weights::Checkpoint& checkpoint,
    const std::vector<PackedEntry>& entries,
    const std::function<void(int64_t)>& on_read);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_PACKED_WEIGHTS_H_
