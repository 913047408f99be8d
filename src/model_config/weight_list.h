// The tensors of a decoder: Hugging Face's names and shapes, the part of each
// that a rank keeps, and the matrix of Weft to which it goes. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
#define WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "src/model_config/model_config.h"
#include "src/parallel/shard.h"

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

// A tensor of a checkpoint that has an entry's tensor.
struct StoredPlace {
  std::string name;
  std::vector<int64_t> shape;
  // The first row of the entry's tensor. Rows count over all dimensions but the
  // last.
  int64_t first_row = 0;
};

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
  // Where transformers 5 has the tensor in memory: one tensor has the matrices
  // of all experts. Checkpoints may have either form. No name: there is one
  // form.
  StoredPlace fused = {};

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

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
