// The frozen weights of the decoder. Projections that share an input are stored
// as one stacked matrix: q, k, v, and gate, up. Norm weights are stored as the
// factors by which a norm multiplies. If a checkpoint stores w for a factor 1 +
// w, the factor is kept in f32, because it does not fit a narrower dtype.
// Matrices may be held in 8 bits (MatrixFormat), with a scale for each group of
// adjacent inputs of a row. Each rank quantises its own part, so the first
// group of a rank begins at the rank's first input.
//
// Legend: H hidden, F feed-forward, V vocabulary, C head features, Q and K
// query and key/value heads.
#ifndef WEFT_SRC_MODEL_DECODER_WEIGHTS_H_
#define WEFT_SRC_MODEL_DECODER_WEIGHTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "src/lora/lora_linear.h"
#include "src/model/experts.h"
#include "src/model_config/model_config.h"
#include "src/model_config/weight_list.h"
#include "src/parallel/shard.h"
#include "src/weights/checkpoint.h"

namespace weft::model {

struct LayerWeights {
  // Before attention. A norm that the model does not have (ModelConfig::norms)
  // is undefined.
  at::Tensor input_norm_H;
  // [(Q + 2K) C, H], rows q | k | v. With output gates, q has rows of queries
  // and gates head by head. In a layer with a gated delta rule, rows q | k | v
  // | z | b | a of all heads.
  lora::BaseLinear qkv;
  at::Tensor q_norm_C;  // [C], or [Q C] with model_config::QkNorm::kWhole.
  at::Tensor k_norm_C;
  at::Tensor sinks_H;  // [Q]; undefined without sinks.
  lora::BaseLinear o;  // [H, Q C]; [H, value width] with a gated delta rule.
  at::Tensor attention_out_norm_H;
  at::Tensor mlp_norm_H;     // Before the MLP.
  lora::BaseLinear gate_up;  // [2F, H], rows gate | up.
  lora::BaseLinear down;     // [H, F].
  ExpertWeights experts;     // Replaces gate_up and down in a layer
                             // of experts.
  at::Tensor mlp_out_norm_H;
  // The other parameters of a gated delta rule (ops::DeltaParameters), and the
  // norm of its output.
  at::Tensor conv_WR1, a_log_H, dt_bias_H, delta_norm_V;
};

// The weights of one rank: its columns of o and down, its rows of the other
// projections, of embedding and of head, and the sinks of its query heads. A
// rank also has a part of the shared expert and of each expert of its expert
// group, split in the same way (model_shard.h). Every rank has all norms,
// routers and gates of shared experts. If ranks sum their products by o or
// down, only one of these ranks has the bias.
struct DecoderWeights {
  // The dtype of matrices that are not in 8 bits.
  at::ScalarType dtype = at::kFloat;
  at::Tensor embedding_VH;
  std::vector<LayerWeights> layers;
  at::Tensor final_norm_H;
  at::Tensor head_VH;  // embedding_VH itself if the model ties them.
};

// Checks that the checkpoint has all tensors of the model, with the right
// shapes, and that CheckNoOtherTensors accepts the checkpoint. Reads no
// weights. Errors: those of Checkpoint::Find, CheckStored and
// CheckNoOtherTensors.
absl::Status CheckDecoderWeights(const weights::Checkpoint& checkpoint,
                                 const model_config::ModelConfig& config);

// Reads the rank's part of every tensor, on all compute threads. First calls
// CheckDecoderWeights. Shows a progress bar. `shard` must pass
// CheckTensorParallelSize; the default is the whole model. Matrices in 8
// bits are quantised in small parts while they are read, so memory never holds
// the whole model in another dtype.
// Errors: those of CheckDecoderWeights, weights::ReadPlan and ReadPacked;
// INVALID_ARGUMENT if the checkpoint has a tied head that differs from the
// embedding, or if a number that is to be quantised is not finite.
absl::StatusOr<DecoderWeights> LoadDecoderWeights(
    const weights::Checkpoint& checkpoint,
    const model_config::ModelConfig& config, at::ScalarType dtype,
    at::Device device, const parallel::Shard& shard = {},
    model_config::MatrixFormat format = model_config::MatrixFormat::kDtype);

// Returns weights of the model's shape without a checkpoint: random matrices
// that keep activations near one, norms of one, biases of zero. Equal seeds
// give equal weights for any number of threads. Each rank gets its part of
// these weights.
DecoderWeights MakeDummyWeights(
    const model_config::ModelConfig& config, at::ScalarType dtype,
    at::Device device, uint64_t seed, const parallel::Shard& shard = {},
    model_config::MatrixFormat format = model_config::MatrixFormat::kDtype);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_DECODER_WEIGHTS_H_
