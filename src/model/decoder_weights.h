// The frozen weights of the decoder, loaded once. Projections that share an
// input are stored stacked: q, k, v as one matrix, gate and up as one. Norm
// weights are stored as the factors themselves. If the checkpoint stores a
// factor as w with factor 1 + w, the weight is kept in f32, because 1 + w does
// not fit a narrower dtype. Matrices may be held in 8 bits (MatrixFormat). A
// rank quantises its own part, so a group begins at the first input that the
// rank has.
//
// Legend: H hidden, F feed-forward, V vocabulary, C head features, Q and K
// query and key/value heads.
#ifndef WEFT_SRC_MODEL_DECODER_WEIGHTS_H_
#define WEFT_SRC_MODEL_DECODER_WEIGHTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "src/lora/lora_linear.h"
#include "src/model_config/model_config.h"
#include "src/model_config/weight_list.h"
#include "src/moe/experts.h"
#include "src/parallel/shard.h"
#include "src/weights/checkpoint.h"

namespace weft::model {

struct LayerWeights {
  at::Tensor input_norm_H;  // Before attention.
  lora::BaseLinear qkv;     // [(Q + 2K) C, H], rows q | k | v.
  at::Tensor q_norm_C;      // Undefined without qk_norm.
  at::Tensor k_norm_C;
  at::Tensor sinks_H;               // [Q]; undefined without sinks.
  lora::BaseLinear o;               // [H, Q C].
  at::Tensor attention_out_norm_H;  // Undefined without output_norms.
  at::Tensor mlp_norm_H;            // Before the MLP.
  lora::BaseLinear gate_up;         // [2F, H], rows gate | up.
  lora::BaseLinear down;            // [H, F].
  moe::ExpertWeights experts;       // In place of gate_up and down.
  at::Tensor mlp_out_norm_H;        // Undefined without output_norms.
};

// Returns the weights of a layer, or the error of reading them.
using LayerLoader = std::function<absl::StatusOr<LayerWeights>(int layer)>;

// The weights of one rank: its columns of o and down, and its rows of all other
// matrices. Only rank 0 has the biases of o and down.
struct DecoderWeights {
  // The dtype of all that is not in 8 bits. Read only with such matrices.
  at::ScalarType dtype = at::kFloat;
  at::Tensor embedding_VH;
  std::vector<LayerWeights> layers;
  at::Tensor final_norm_H;
  at::Tensor head_VH;  // embedding_VH itself if the model ties them.
};

// Checks that the checkpoint has exactly the tensors of the model, with the
// right shapes. Reads no weights. Errors: those of LoadDecoderWeights, without
// those of reading.
[[nodiscard]] absl::Status CheckDecoderWeights(
    const weights::Checkpoint& checkpoint, const ModelConfig& config);

// Reads the rank's part of every tensor, and no other byte, in parallel and
// directly into its place. Shows a progress bar. Reads nothing before all
// tensors are found. `shard` must pass model::CheckTensorParallelSize; the
// default is the whole model. Matrices in 8 bits are quantised as they are
// read, a block of a few MB on each thread, so no other copy of them exists.
// Errors: those of weights::ReadPlan; INVALID_ARGUMENT for a tensor that
// config.json does not imply (such as a bias), for a tied head in the
// checkpoint that differs from the embedding, and for a number in a matrix of 8
// bits that is not finite.
[[nodiscard]] absl::StatusOr<DecoderWeights> LoadDecoderWeights(
    const weights::Checkpoint& checkpoint, const ModelConfig& config,
    at::ScalarType dtype, at::Device device, const parallel::Shard& shard = {},
    MatrixFormat format = MatrixFormat::kDtype);

// Makes weights of the model's shape without a checkpoint: random matrices that
// keep activations near one, norms of one, biases of zero. Equal seeds give
// equal weights for any number of threads. Each rank gets its part of them.
[[nodiscard]] DecoderWeights MakeDummyWeights(
    const ModelConfig& config, at::ScalarType dtype, at::Device device,
    uint64_t seed, const parallel::Shard& shard = {},
    MatrixFormat format = MatrixFormat::kDtype);

// Reads only the listed entries, like LoadDecoderWeights but without progress
// and without checks of other tensors. Entries are those of ListWeights, or
// parts of them. Other tensors are undefined.
[[nodiscard]] absl::StatusOr<DecoderWeights> LoadEntries(
    const weights::Checkpoint& checkpoint, const ModelConfig& config,
    const std::vector<WeightEntry>& entries, at::ScalarType dtype,
    at::Device device);

// Only the embedding and the head of a model.
struct HeadWeights {
  at::Tensor embedding_VH;
  at::Tensor head_VH;  // embedding_VH itself if the model ties them.
};

// Reads embedding and head like LoadDecoderWeights. Other tensors may be
// missing.
[[nodiscard]] absl::StatusOr<HeadWeights> LoadHeadWeights(
    const weights::Checkpoint& checkpoint, const ModelConfig& config,
    at::ScalarType dtype, at::Device device);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_DECODER_WEIGHTS_H_
