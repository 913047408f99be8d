// Finds the tensors of a checkpoint that a decoder reads, and checks whether
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

namespace weft::model_config {

// Returns where the checkpoint stores the entry's matrix. Returns `entry.fused`
// if it has a name, except if the checkpoint lacks the tensor and may have the
// matrix alone. Otherwise returns the tensor `entry.name`. If the checkpoint
// has transposed matrices of experts, the returned form is kTransposed. If it
// has MXFP4 blocks in place of a kTransposed tensor, the form is kMxfp4.
StoredPlace PlaceIn(const weights::Checkpoint& checkpoint,
                    const WeightEntry& entry);

// A tensor of the checkpoint, and the shape and type that it must have.
struct StoredPart {
  std::string name;
  std::vector<int64_t> shape;
  bool is_bytes = false;  // dtype U8; if false, F32, F16 or BF16.
};

// Returns the tensors of a place: one tensor, or blocks and scales for MXFP4.
std::vector<StoredPart> PartsOf(const StoredPlace& place);

// Returns INVALID_ARGUMENT, which quotes `name`, if `stored` does not fit
// `part`. `stored` must have the part's shape, be row-major and have dtype F32,
// F16 or BF16 (U8 with is_bytes).
absl::Status CheckStored(absl::string_view name, const StoredPart& part,
                         const weights::DiskTensor& stored);

// Returns INVALID_ARGUMENT, naming the tensor, if the checkpoint has a tensor
// that a decoder of this config would ignore. Checks tensors inside the layers,
// such as the bias of a projection, and biases of the head and the final norm.
// Accepts rotary tables and layers beyond num_layers.
absl::Status CheckNoOtherTensors(const weights::Checkpoint& checkpoint,
                                 const ModelConfig& config);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_STORED_WEIGHTS_H_
