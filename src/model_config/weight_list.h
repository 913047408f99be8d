// The tensors of a decoder: Hugging Face's names and shapes, the part of each
// that a rank keeps, and the matrix of Weft to which it goes. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
#define WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "src/model_config/model_config.h"
#include "src/parallel/shard.h"
#include "src/weights/checkpoint.h"

namespace weft::model {

// Names the fields of DecoderWeights and LayerWeights. Projections that share
// an input share a slot.
enum class WeightSlot : uint8_t {
  kEmbedding,
  kInputNorm,
  kQkv,
  kQkvBias,
  kQNorm,
  kKNorm,
  kO,
  kOBias,
  kAttentionOutNorm,
  kMlpNorm,
  kGateUp,
  kGateUpBias,
  kDown,
  kDownBias,
  kRouter,
  kExpertGateUp,  // All experts, each with its rows gate | up.
  kExpertDown,
  kSharedGateUp,
  kSharedDown,
  kSharedGate,
  kMlpOutNorm,
  kFinalNorm,
  kHead,
};

[[nodiscard]] bool IsNorm(WeightSlot slot);

struct WeightEntry {
  std::string name;  // Such as "model.layers.0.mlp.up_proj.weight".
  WeightSlot slot = WeightSlot::kEmbedding;
  int layer = 0;               // 0 for a slot outside the layers.
  std::vector<int64_t> shape;  // Shape of the whole tensor.
  // The part that the rank keeps begins at this row and column and has this
  // shape.
  std::vector<int64_t> part_shape;
  int64_t part_row = 0;
  int64_t part_column = 0;
  // The first row of this part in the slot's matrix on the rank, and the number
  // of rows of that matrix.
  int64_t first_row = 0;
  int64_t slot_rows = 0;

  [[nodiscard]] int64_t num_elements() const;  // Counts the whole tensor.
};

// Lists the tensors in the order of the forward pass, with the entries of a
// slot next to each other. Does not list a tied head. Biases of products that
// are summed over ranks are listed on rank 0 alone, so that they are added
// once. `shard` must pass model::CheckTensorParallelSize.
[[nodiscard]] std::vector<WeightEntry> ListWeights(
    const ModelConfig& config, const parallel::Shard& shard = {});

// Lists only the embedding and the head.
[[nodiscard]] std::vector<WeightEntry> ListHeadWeights(
    const ModelConfig& config);

// Returns the bytes of an entry's slot in the common buffer. Weights have
// `element_bytes` each, but norms that the checkpoint stores less one are f32.
[[nodiscard]] int64_t SlotBytes(const WeightEntry& entry,
                                const ModelConfig& config,
                                int64_t element_bytes);
[[nodiscard]] bool IsWide(WeightSlot slot, const ModelConfig& config);
// Returns the bytes of all slots.
[[nodiscard]] int64_t WeightBytes(const ModelConfig& config,
                                  int64_t element_bytes,
                                  const parallel::Shard& shard = {});

// Returns INVALID_ARGUMENT, which quotes `name`, if the stored tensor does not
// match the entry: it has another shape, a dtype other than F32, F16 and BF16,
// or is not row-major.
[[nodiscard]] absl::Status CheckStored(absl::string_view name,
                                       const WeightEntry& entry,
                                       const weights::DiskTensor& stored);

// Returns INVALID_ARGUMENT naming a tensor for which `config` has no place: one
// in a layer, such as the bias of a projection, or a bias of the head or of the
// final norm.
[[nodiscard]] absl::Status CheckNoOtherTensors(
    const weights::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
