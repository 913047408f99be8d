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
  kSinks,
  kO,
  kOBias,
  kAttentionOutNorm,
  kMlpNorm,
  kGateUp,
  kGateUpBias,
  kDown,
  kDownBias,
  kRouter,
  kRouterBias,
  kExpertGateUp,  // The rank's experts, each with its rows gate | up.
  kExpertGateUpBias,
  kExpertDown,
  kExpertDownBias,
  kSharedGateUp,
  kSharedDown,
  kSharedGate,
  kMlpOutNorm,
  kFinalNorm,
  kHead,
};

[[nodiscard]] bool IsNorm(WeightSlot slot);

// How matrices of the base model are held: as numbers of the model's dtype, or
// in 8 bits (ops/int8_weight.h).
enum class MatrixFormat : uint8_t { kDtype, kInt8 };

// Returns whether a slot is in 8 bits under MatrixFormat::kInt8. These are the
// embedding, the head and the projections, also those of experts. Norms,
// biases, sinks, the router and the gate of a shared expert are not.
[[nodiscard]] bool MayBeInt8(WeightSlot slot);

// How a tensor of a checkpoint has a matrix.
enum class StoredForm : uint8_t {
  kRows,        // As consecutive rows.
  kTransposed,  // [experts, columns, rows], or [experts, rows] for vectors.
  // 4-bit blocks [experts, rows, columns / 32, 16] and scales [experts, rows,
  // columns / 32].
  kMxfp4,
};

// A tensor of a checkpoint that has an entry's tensor.
struct StoredPlace {
  std::string name;
  std::vector<int64_t> shape;
  // kRows: the first row of the entry's tensor, where rows count over all
  // dimensions but the last. Other forms: the row of the expert's matrix that
  // is the entry's first one.
  int64_t first_row = 0;
  StoredForm form = StoredForm::kRows;
  int64_t expert = 0;    // Not kRows: whose matrix it is.
  int64_t row_step = 1;  // Not kRows: from one row of the entry to the next.
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
  // The tensor that has the matrices of all experts, with this entry's among
  // them; its name is empty if there is no such tensor. If its form is kRows, a
  // checkpoint may have a tensor for each expert instead.
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
// `element_bytes` each, but norms that the checkpoint stores less one are f32,
// and matrices may be in 8 bits.
[[nodiscard]] int64_t SlotBytes(const WeightEntry& entry,
                                const ModelConfig& config,
                                int64_t element_bytes,
                                MatrixFormat format = MatrixFormat::kDtype);
[[nodiscard]] bool IsWide(WeightSlot slot, const ModelConfig& config);
// Returns the bytes of all slots.
[[nodiscard]] int64_t WeightBytes(const ModelConfig& config,
                                  int64_t element_bytes,
                                  const parallel::Shard& shard = {},
                                  MatrixFormat format = MatrixFormat::kDtype);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
