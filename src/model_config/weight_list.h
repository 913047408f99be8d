// Lists the tensors of a decoder: their names and shapes in Hugging Face's
// files, the part of each that a rank keeps, and the matrix of Weft to which
// this part goes. Torch-free.
#ifndef WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
#define WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_

#include <cstdint>
#include <string>
#include <vector>

#include "src/model_config/model_config.h"
#include "src/parallel/shard.h"

namespace weft::model_config {

// A matrix or vector of Weft's decoder, which is a field of DecoderWeights or
// LayerWeights. q, k and v share a slot, and gate and up share one. In a layer
// with a gated delta rule, kQkv has all input projections, and kO the output
// projection.
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
  kRouterCorrection,  // MoeConfig::sigmoid.
  kExpertGateUp,      // The rank's experts, each with rows of gate, then up.
  kExpertGateUpBias,
  kExpertDown,
  kExpertDownBias,
  kSharedGateUp,
  kSharedDown,
  kSharedGate,
  kMlpOutNorm,
  kConv,  // The next four are of layers with a gated delta rule.
  kDecay,
  kDtBias,
  kDeltaNorm,
  kFinalNorm,
  kHead,
};

bool IsNorm(WeightSlot slot);

// The format of the base model's matrices in memory: numbers of the model's
// dtype, or 8 bits (ops/int8_weight.h).
enum class MatrixFormat : uint8_t { kDtype, kInt8 };

// Returns whether MatrixFormat::kInt8 stores a slot in 8 bits. This is true for
// the embedding, the head and the projections, including those of experts.
// Norms, biases, sinks, the router and the gate of a shared expert are never in
// 8 bits.
bool MayBeInt8(WeightSlot slot);

// How a tensor of a checkpoint stores an entry's matrix.
enum class StoredForm : uint8_t {
  kRows,        // As consecutive rows.
  kTransposed,  // [experts, columns, rows], or [experts, rows] for vectors.
  // 4-bit blocks [experts, rows, columns / 32, 16] and scales [experts, rows,
  // columns / 32].
  kMxfp4,
};

// A tensor of a checkpoint that contains an entry's matrix, and the place of
// the matrix in the tensor.
struct StoredPlace {
  std::string name;
  std::vector<int64_t> shape;
  // The row of the tensor at which the entry begins. With kRows, this is a row
  // of the tensor flattened to two dimensions. With the other forms, it is a
  // row of the matrix of `expert`.
  int64_t first_row = 0;
  StoredForm form = StoredForm::kRows;
  int64_t expert = 0;    // The expert's number, if there are experts.
  int64_t row_step = 1;  // The stride of the entry's rows; 1 with kRows.
  // Checkpoints have only this tensor, not one for the matrix alone. Always so
  // if the form is not kRows.
  bool is_only = false;
};

struct WeightEntry {
  std::string name;  // Such as "model.layers.0.mlp.up_proj.weight".
  WeightSlot slot = WeightSlot::kEmbedding;
  int layer = 0;               // 0 for a slot outside the layers.
  std::vector<int64_t> shape;  // Shape of the whole tensor.
  // The part that the rank keeps has the shape `part_shape` and begins at row
  // `part_row` and column `part_column` of the tensor.
  std::vector<int64_t> part_shape;
  int64_t part_row = 0;
  int64_t part_column = 0;
  // The part begins at row `first_row` of the slot's matrix on this rank. This
  // matrix has `slot_rows` rows.
  int64_t first_row = 0;
  int64_t slot_rows = 0;
  // The rows of a head of q or k, of which the first are in checkpoints in the
  // order ModelConfig::head_order. 0: the rows are not those of such heads.
  int64_t head_rows = 0;
  // Another tensor of a checkpoint that may contain this matrix, such as the
  // tensor of all experts. Its name is empty if there is none. A checkpoint has
  // either this tensor or the tensor `name`, unless `fused.is_only`.
  StoredPlace fused = {};

  int64_t num_elements() const;  // In the whole tensor.
};

// Lists the tensors, layer by layer. The entries of a slot are next to each
// other. A tied head is not listed. If a product is summed over ranks, only one
// of these ranks lists the bias, so that the sum has the bias once. REQUIRES:
// CheckTensorParallelSize accepts shard.size.
std::vector<WeightEntry> ListWeights(const ModelConfig& config,
                                     const parallel::Shard& shard = {});

// Lists only the whole embedding and, if the head is not tied, the whole head.
std::vector<WeightEntry> ListHeadWeights(const ModelConfig& config);

// Returns the bytes that the slot of an entry takes in the buffer of all
// weights, rounded up for alignment. Weights have `element_bytes` each, except
// vectors with IsWide and matrices in 8 bits.
int64_t SlotBytes(const WeightEntry& entry, const ModelConfig& config,
                  int64_t element_bytes,
                  MatrixFormat format = MatrixFormat::kDtype);
// Returns whether the slot is a norm that multiplies by 1 + the stored weight
// (ModelConfig::norms_from_one).
bool IsFromOne(WeightSlot slot, const ModelConfig& config);
// Returns whether the slot is in f32: a norm with IsFromOne, the decay and
// dt_bias of a gated delta rule, or corrections of scores, which choose between
// experts of nearly equal score.
bool IsWide(WeightSlot slot, const ModelConfig& config);
// Returns the bytes of all slots of a rank together.
int64_t WeightBytes(const ModelConfig& config, int64_t element_bytes,
                    const parallel::Shard& shard = {},
                    MatrixFormat format = MatrixFormat::kDtype);

}  // namespace weft::model_config

#endif  // WEFT_SRC_MODEL_CONFIG_WEIGHT_LIST_H_
