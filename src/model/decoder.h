// The decoder: one function runs the layers for training and for evaluation.
//
// Legend: T packed tokens, H hidden, K experts per token, R score rows, N
// parameters of an adapter.
//
// The backward pass is written by hand. The forward pass keeps what is
// expensive to recompute: layer inputs, q, k, v, attention output, gate and up.
// The backward pass recomputes the rest, and frees each buffer after its use.
//
// With a tensor group, every rank makes the same calls on the same batch, with
// its part of the weights (model_shard.h) and of the adapters. The ranks'
// results are summed after the embedding, after o and after down. In the
// backward pass they are summed after the input gradients of q, k, v and of
// gate, up. So the residual stream has the same bits on all ranks.
#ifndef WEFT_SRC_MODEL_DECODER_H_
#define WEFT_SRC_MODEL_DECODER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/model/decoder_weights.h"
#include "src/model/layer.h"
#include "src/model/packed_batch.h"
#include "src/model/residual.h"
#include "src/model/tape.h"
#include "src/model/token_rows.h"
#include "src/model_config/model_config.h"
#include "src/ops/rotary.h"
#include "src/parallel/communicator.h"

namespace weft::model {

class Decoder {
 public:
  // `config` describes the whole model; `weights` are the rank's part.
  // `tensor_group` outlives the decoder; it is null if there is one rank.
  Decoder(ModelConfig config, DecoderWeights weights, int64_t num_positions,
          parallel::Communicator* tensor_group = nullptr);

  [[nodiscard]] const ModelConfig& config() const { return config_; }
  // Returns the configuration of this rank's part of the model. The rank's part
  // of an adapter has its shape(), and the rank's cache has its heads.
  [[nodiscard]] const ModelConfig& local_config() const {
    return local_config_;
  }
  [[nodiscard]] parallel::Communicator* tensor_group() const {
    return tensor_group_;
  }
  // Returns the number of ranks in the tensor group; 1 without one.
  [[nodiscard]] int tensor_size() const;
  [[nodiscard]] const DecoderWeights& weights() const { return weights_; }
  // Returns the dtype of activations, cache and adapters: that of the weights,
  // but f32 on a CPU with weights in bf16 or in 8 bits. Products then round the
  // activations or widen the weights (ops/matmul.h).
  [[nodiscard]] at::ScalarType dtype() const { return dtype_; }
  [[nodiscard]] at::Device device() const;

  // In all calls below, the routing's adapters, the cache and the tape are this
  // rank's parts.

  // Runs embedding and layers. Returns the residual stream [T, H] before the
  // final norm. `tape` is filled in kTrain and must be null in kEval. The first
  // `num_recomputed` layers keep only their input. `kv` may be null. `experts`,
  // if given, receives the experts [T, K], i64, of each layer that has experts.
  // Errors:  throws c10::Error.
  // Threads: engine thread only.
  [[nodiscard]] at::Tensor ForwardLayers(
      Mode mode, const PackedBatch& batch, Tape* tape, int num_recomputed,
      KvAccess* kv, std::vector<at::Tensor>* experts = nullptr) const;

  // Does the same in kEval for rows x_TH of the embedding, all in f32, on one
  // rank and without adapters. Layers have their weights only while they run.
  // Errors: those of `load`.
  [[nodiscard]] absl::StatusOr<at::Tensor> ForwardStreamed(
      at::Tensor x_TH, const PackedBatch& batch, const LayerLoader& load);

  // Runs the layers of a forward pass backwards from d_out_TH, the gradient of
  // the residual stream [T, H]. Adds to the gradients [N] of the versions in
  // batch.routing. Consumes the tape and d_out_TH's storage.
  void BackwardLayers(const PackedBatch& batch, Tape& tape, at::Tensor d_out_TH,
                      const lora::LoraGradients& gradients) const;

  // Applies the final norm to rows [R, H].
  [[nodiscard]] at::Tensor FinalNorm(const at::Tensor& x_RH) const;
  [[nodiscard]] at::Tensor FinalNormBackward(const at::Tensor& dy_RH,
                                             const at::Tensor& x_RH) const;

 private:
  [[nodiscard]] Layer LayerAt(int index) const;
  // Takes the stream with the norm that this layer reads. Returns it with the
  // norm that the next layer reads, or without a norm after the last layer.
  // `experts_TK` is as for moe::ForwardExperts; the cache keeps it too.
  Stream RunLayer(int index, Stream stream, const Pass& pass, LayerTape* tape,
                  at::Tensor& experts_TK, KvAccess* kv) const;
  // Fills the tape of a checkpointed layer from its input.
  void RecomputeLayer(int index, const Pass& pass, LayerTape& tape) const;

  [[nodiscard]] at::Tensor Embed(const PackedBatch& batch) const;
  // Adds the gradients of the adapters' embeddings, given that of the rows.
  void EmbedBackward(const BackwardPass& pass, const at::Tensor& d_TH) const;
  [[nodiscard]] TokenRows RowsOf(const at::Tensor& tokens_T) const;
  // Returns the norm that the layer at `index` reads.
  [[nodiscard]] at::Tensor InputNorm(int index, const at::Tensor& x_TH) const;

  ModelConfig config_;
  parallel::Communicator* tensor_group_;
  ModelConfig local_config_;
  // The factor of embeddings, rounded to the model's dtype as in training.
  double embedding_scale_;
  lora::ModelShape shape_;  // Shape of this rank's part.
  at::ScalarType dtype_;
  DecoderWeights weights_;
  std::vector<ops::RotaryTable> rotary_;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_DECODER_H_
