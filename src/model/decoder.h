// The decoder: the embedding, the layers and the final norm of a model.
//
// Legend: T packed tokens, H hidden, K experts per token, R score rows, N
// parameters of an adapter.
//
// The backward pass is written by hand. The forward pass keeps the tensors that
// are expensive to recompute (Tape). The backward pass recomputes the others,
// and frees the tensors of a layer after their use.
//
// With a tensor group, every rank makes the same calls on the same batch, with
// its part of the weights (model_shard.h) and of the adapters. The ranks sum
// their results after the embedding, after o and after down. In the backward
// pass they sum the input gradients of q, k, v and of gate, up. So the residual
// stream has the same bits on all ranks.
#ifndef WEFT_SRC_MODEL_DECODER_H_
#define WEFT_SRC_MODEL_DECODER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/model/decoder_weights.h"
#include "src/model/layer.h"
#include "src/model/packed_batch.h"
#include "src/model_config/model_config.h"
#include "src/ops/rotary.h"
#include "src/parallel/communicator.h"

namespace weft::model {

class Decoder {
 public:
  // `config` describes the whole model, and `weights` are the rank's part.
  // `tensor_group` outlives the decoder; it is null if there is one rank.
  Decoder(model_config::ModelConfig config, DecoderWeights weights,
          int64_t num_positions,
          parallel::Communicator* tensor_group = nullptr);

  const model_config::ModelConfig& config() const { return config_; }
  // Returns the configuration of this rank's part of the model. Its shape()
  // describes the rank's adapters, and its num_kv_heads the rank's cache.
  const model_config::ModelConfig& local_config() const {
    return local_config_;
  }
  parallel::Communicator* tensor_group() const { return tensor_group_; }
  // Returns the number of ranks in the tensor group, or 1 without a group.
  int tensor_size() const;
  const DecoderWeights& weights() const { return weights_; }
  // Returns the dtype of activations, cache and adapters. This is
  // DecoderWeights::dtype, except that on a CPU f32 replaces bf16. Products
  // with bf16 weights then round the activations or widen the weights
  // (ops/matmul.h).
  at::ScalarType dtype() const { return dtype_; }
  at::Device device() const;
  // Returns whether a decode pass queues all its work without a result from the
  // device: in every layer of experts, SortsOnDevice.
  bool DecodesWithoutHost() const;

  // In all methods below, the adapters, the cache and the tape are this rank's
  // parts.

  // Runs the embedding and the layers. Returns the residual stream [T, H]
  // before the final norm. Fills `tape` in kTrain; in kEval it is null. The
  // first `num_recomputed` layers keep only x_in_TH and experts_TK of their
  // tape. `kv` is null in kTrain and may be null in kEval. If `experts` is not
  // null, appends the experts [T, K], i64, of each layer that has experts.
  // Errors:  throws c10::Error.
  // Threads: engine thread only.
  at::Tensor ForwardLayers(Mode mode, const PackedBatch& batch, Tape* tape,
                           int num_recomputed, KvAccess* kv,
                           std::vector<at::Tensor>* experts = nullptr) const;

  // Runs the layers of a forward pass backwards from d_out_TH, the gradient of
  // the residual stream [T, H]. Adds to `gradients` [N], whose versions are in
  // batch.routing. Consumes the tape and the memory of d_out_TH.
  void BackwardLayers(const PackedBatch& batch, Tape& tape, at::Tensor d_out_TH,
                      const lora::LoraGradients& gradients) const;

  // Applies the final norm to rows [R, H].
  at::Tensor FinalNorm(const at::Tensor& x_RH) const;
  at::Tensor FinalNormBackward(const at::Tensor& dy_RH,
                               const at::Tensor& x_RH) const;

 private:
  Layer LayerAt(int index) const;
  // stream.normed_TH is the input of this layer. Returns the stream after the
  // layer, where normed_TH is the input of the next layer, or undefined if this
  // is the last layer. `experts_TK` is as for ForwardExperts. If the layer
  // has experts and the cache keeps experts, writes `experts_TK` to the cache.
  Stream RunLayer(int index, Stream stream, const Pass& pass, LayerTape* tape,
                  at::Tensor& experts_TK, KvAccess* kv) const;
  // Fills the tape of a layer that kept only x_in_TH and experts_TK.
  void RecomputeLayer(int index, const Pass& pass, LayerTape& tape) const;

  at::Tensor Embed(const PackedBatch& batch) const;
  // Adds the gradients of the adapters' embeddings. `d_TH` is the gradient of
  // Embed's result.
  void EmbedBackward(const BackwardPass& pass, const at::Tensor& d_TH) const;
  // The row of each token in the rank's part of the embedding. `foreign_T1`
  // marks tokens whose embedding is on another rank. Such a token has row 0,
  // and the caller discards its result. `foreign_T1` is undefined if the rank
  // has the whole vocabulary. `padding` is the row of the padding token; -1:
  // the rank does not have it.
  struct TokenRows {
    at::Tensor rows_T;
    at::Tensor foreign_T1 = {};
    int64_t padding = -1;
  };
  TokenRows RowsOf(const at::Tensor& tokens_T) const;
  // Returns x_TH after the input norm of the layer at `index`.
  at::Tensor InputNorm(int index, const at::Tensor& x_TH) const;

  model_config::ModelConfig config_;
  parallel::Communicator* tensor_group_;
  model_config::ModelConfig local_config_;
  // The model multiplies embeddings by this factor. That of scaled_embeddings
  // is rounded to the model's dtype as in transformers.
  double embedding_scale_;
  model_config::ModelShape shape_;  // Shape of this rank's part.
  at::ScalarType dtype_;
  DecoderWeights weights_;
  std::vector<ops::RotaryTable> rotary_;
  at::Tensor query_scale_P_;  // [positions] f32; undefined without query_scale.
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_DECODER_H_
