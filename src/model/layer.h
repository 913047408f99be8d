// The arguments that both parts of a decoder layer share (attention.h, mlp.h).
#ifndef WEFT_SRC_MODEL_LAYER_H_
#define WEFT_SRC_MODEL_LAYER_H_

#include "src/lora/lora_linear.h"
#include "src/model/decoder_weights.h"
#include "src/model/packed_batch.h"
#include "src/model_config/model_config.h"
#include "src/ops/rotary.h"
#include "src/parallel/communicator.h"

namespace weft::model {

// One layer. The objects to which it refers outlive it. `config`, `shape` and
// `weights` are the rank's part of the model.
struct Layer {
  int index = 0;
  const LayerWeights& weights;
  const ModelConfig& config;
  const lora::ModelShape& shape;
  const ops::RotaryTable& rotary;
  parallel::Communicator* tensor_group;  // Null if there is one rank.

  [[nodiscard]] bool has_experts() const {
    return shape.experts.InLayer(index);
  }
};

// The arguments that all layers share in one pass. `batch` outlives the object.
struct Pass {
  const PackedBatch& batch;
  const lora::LoraPass lora;
};

struct BackwardPass : Pass {
  const lora::LoraGradients& gradients;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_LAYER_H_
