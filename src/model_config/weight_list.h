// The tensors that a decoder is made of: Hugging Face's names and shapes, the
// part of each that a rank keeps, and the matrix of Weft that it goes to.
// Torch-free.
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

// Fields of DecoderWeights and LayerWeights. Projections that share an input
// share a slot.
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
  kMlpOutNorm,
  kFinalNorm,
  kHead,
};

[[nodiscard]] bool IsNorm(WeightSlot slot);

struct WeightEntry {
  std::string name;  // Canonical: "model.layers.0.mlp.up_proj.weight".
  WeightSlot slot = WeightSlot::kEmbedding;
  int layer = 0;               // 0 for slots outside of the layers.
  std::vector<int64_t> shape;  // The whole tensor's.
  // The part that the rank keeps: this shape, from this row and column on.
  std::vector<int64_t> part_shape;
  int64_t part_row = 0;
  int64_t part_column = 0;
  // Where its rows begin in the rank's matrix of the slot, and how many rows
  // that matrix has.
  int64_t first_row = 0;
  int64_t slot_rows = 0;

  [[nodiscard]] int64_t num_elements() const;  // In the whole tensor.
};

// In the order of the forward pass, entries of a slot next to each other. A
// tied head is not listed. Biases of products that are summed over ranks are
// listed on rank 0 alone, so that they are added once.
// Arguments: shard as model::CheckTensorParallelSize accepts it.
[[nodiscard]] std::vector<WeightEntry> ListWeights(
    const ModelConfig& config, const parallel::Shard& shard = {});

// Lists only embedding and head.
[[nodiscard]] std::vector<WeightEntry> ListHeadWeights(
    const ModelConfig& config);

// Returns the bytes of an entry's slot in the common buffer. Weights have
// `element_bytes` each. Norms that the checkpoint stores less one are f32.
[[nodiscard]] int64_t SlotBytes(const WeightEntry& entry,
                                const ModelConfig& config,
                                int64_t element_bytes);
[[nodiscard]] bool IsWide(WeightSlot slot, const ModelConfig& config);
// Returns the bytes of all slots.
[[nodiscard]] int64_t WeightBytes(const ModelConfig& config,
                                  int64_t element_bytes,
                                  const parallel::Shard& shard = {});

// Returns INVALID_ARGUMENT, with `name`, if the stored tensor has another shape
// than the entry, a dtype other than F32, F16 and BF16, or is not row-major.
[[nodiscard]] absl::Status CheckStored(absl::string_view name,
                                       const WeightEntry& entry,
                                       const weights::DiskTensor& stored);

// Returns INVALID_ARGUMENT naming a tensor that `config` has no place for: in a
// layer, such as the bias of a projection, or a bias of the head or of the
// final norm.
[[nodiscard]] absl::Status CheckNoOtherTensors(
    const weights::Checkpoint& checkpoint, const ModelConfig& config);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
