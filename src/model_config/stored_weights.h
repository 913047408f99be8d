// The tensors of a checkpoint that a decoder reads: where they are, and whether
// they fit. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_STORED_WEIGHTS_H_
#define WEFT_SRC_MODEL_CONFIG_STORED_WEIGHTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "src/model_config/model_config.h"
#include "src/model_config/weight_list.h"
#include "src/weights/checkpoint.h"

namespace weft::model {

// Returns where the checkpoint has the entry's tensor: at its fused place if
// there is such a tensor, otherwise under its own name. A matrix of a form
// other than kRows may be MXFP4 instead.
[[nodiscard]] StoredPlace PlaceIn(const weights::Checkpoint& checkpoint,
                                  const WeightEntry& entry);

// A tensor of the checkpoint, and what it must be.
struct StoredPart {
  std::string name;
  std::vector<int64_t> shape;
  bool is_bytes = false;  // U8 instead of floating point.
};

// Returns the tensors of a place: one, or blocks and scales for MXFP4.
[[nodiscard]] std::vector<StoredPart> PartsOf(const StoredPlace& place);

// Returns INVALID_ARGUMENT, which quotes `name`, if the stored tensor does not
// fit: it has another shape, a dtype other than F32, F16 and BF16 (or U8), or
// is not row-major.
[[nodiscard]] absl::Status CheckStored(absl::string_view name,
                                       const StoredPart& part,
                                       const weights::DiskTensor& stored);

// Returns INVALID_ARGUMENT naming a tensor for which `config` has no place: one
// in a layer, such as the bias of a projection, or a bias of the head or of the
// final norm.
[[nodiscard]] absl::Status CheckNoOtherTensors(
    const weights::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_STORED_WEIGHTS_H_
