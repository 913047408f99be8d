// A layer of the decoder, forward and backward: attention, then the MLP or the
// experts that replace it, and the residual stream between them.
//
// Legend: T packed tokens, H hidden, Q query heads, K key/value heads (experts
// per token in experts_TK), C head features, W the width of all input
// projections (OutWidth of q, k and v), F feed-forward.
#ifndef WEFT_SRC_MODEL_LAYER_H_
#define WEFT_SRC_MODEL_LAYER_H_

#include <ATen/core/Tensor.h>

#include <vector>

#include "src/lora/lora_linear.h"
#include "src/model/decoder_weights.h"
#include "src/model/experts.h"
#include "src/model/packed_batch.h"
#include "src/model_config/model_config.h"
#include "src/ops/gated_delta.h"
#include "src/ops/rotary.h"
#include "src/ops/tree_attention.h"
#include "src/parallel/communicator.h"

namespace weft::model {

// One layer. The objects to which it refers outlive it. `config`, `shape` and
// `weights` are the rank's part of the model.
struct Layer {
  int index = 0;
  const LayerWeights& weights;
  const model_config::ModelConfig& config;
  const model_config::ModelShape& shape;
  const ops::RotaryTable& rotary;
  const at::Tensor& query_scale_P;       // Undefined if queries are not scaled.
  parallel::Communicator* tensor_group;  // Null if there is one rank.

  bool has_experts() const { return shape.experts.InLayer(index); }
  // Returns whether the layer computes a gated delta rule (delta_layer.h).
  bool has_delta() const { return shape.delta.InLayer(index); }
  // Returns the site of the input projections, and of the output projection.
  lora::LoraSite InputSite() const {
    return {index, lora::GroupsOf(shape, index)[0]};
  }
  lora::LoraSite OutputSite() const {
    return {index, lora::GroupsOf(shape, index)[1]};
  }
};

// The arguments that all layers share in one pass. `batch` outlives the object.
struct Pass {
  const PackedBatch& batch;
  const lora::LoraPass lora;
  const ops::DeltaTrees delta;
};

struct BackwardPass : Pass {
  const lora::LoraGradients& gradients;
};

// The mode of a forward pass. kTrain fills a tape and does not use the cache.
// kEval keeps no tape and may use the cache.
enum class Mode { kTrain, kEval };

// The tensors that one layer keeps for its backward pass. A recomputed layer
// keeps only x_in_TH and, if it has experts, experts_TK. Recomputation uses
// experts_TK, so that a token has the same experts again even if its hidden
// state is rounded differently.
struct LayerTape {
  at::Tensor x_in_TH;
  // The input projections. q and k are those after the rotation.
  at::Tensor qkv_TW;
  at::Tensor qk_raw_TW;  // q and k before the norms; undefined without them.
  ops::AttentionOutput attention;
  // In place of the last two in a layer with a gated delta rule: what the rule
  // keeps, and its output before the gated norm.
  ops::DeltaTape delta;
  at::Tensor delta_out_THV;
  at::Tensor x_mid_TH;  // Residual stream after attention.
  at::Tensor gate_up_T2F;
  at::Tensor experts_TK;  // The experts of every token.
  ExpertTape experts;
  // The outputs of attention and MLP before their output norms, if the model
  // has output norms.
  at::Tensor attention_raw_TH, mlp_raw_TH;
  lora::ShrunkInputs shrunk_qkv, shrunk_o, shrunk_gate_up, shrunk_down;
};

// The tensors that a training forward pass keeps for its backward pass.
struct Tape {
  std::vector<LayerTape> layers;
};

// The residual stream, and the output of the norm that follows, which is the
// stream itself if the model has no such norm. The next product reads normed_TH
// and frees it. After the last layer, normed_TH has no meaning.
struct Stream {
  at::Tensor x_TH;
  at::Tensor normed_TH;
};

// Returns the norm of x, or x if weight_H is undefined.
at::Tensor Norm(const at::Tensor& x_TH, const at::Tensor& weight_H, double eps);
// Adds dLoss/dx of Norm to dx.
void NormBackward(const at::Tensor& dy_TH, const at::Tensor& x_TH,
                  const at::Tensor& weight_H, double eps, at::Tensor& dx_TH);

// Sums the tensor over the ranks of the group, in place. Does nothing if
// `group` is null.
void SumOverRanks(parallel::Communicator* group, at::Tensor& partial_TH);

// Returns x + y, or x + norm(y) if out_norm_H is defined. If out_norm_H is
// defined and `raw` is not null, sets `raw` to y. Also returns the sum normed
// with the weights next_norm_H, or the sum itself if next_norm_H is undefined.
// Consumes y.
Stream AddOutput(const at::Tensor& x_TH, at::Tensor y_TH,
                 const at::Tensor& out_norm_H, const at::Tensor& next_norm_H,
                 double eps, at::Tensor* raw);

// Returns dLoss/dy of AddOutput. `d_TH` is the gradient of the sum. `raw_TH` is
// y, and is read only if out_norm_H is defined.
at::Tensor AddOutputBackward(const at::Tensor& d_TH,
                             const at::Tensor& out_norm_H, double eps,
                             const at::Tensor& raw_TH);

// The first part of a layer: the product with q, k and v, the norms and the
// rotation of the heads, attention, and the product with o. The references in
// `layer` outlive the object. Threads: engine thread.
class Attention {
 public:
  explicit Attention(const Layer& layer) : layer_(layer) {}

  // stream.normed_TH is the input of q, k and v. Returns the stream after
  // attention, where normed_TH is the input of the MLP. `tape` and `kv` may be
  // null.
  Stream Forward(Stream stream, const Pass& pass, LayerTape* tape,
                 KvAccess* kv) const;
  // Replaces d_TH, the gradient of the residual stream after attention, by the
  // gradient of the stream before attention. The first layer does so only if an
  // adapter trains the embedding. Adds to pass.gradients.
  void Backward(const BackwardPass& pass, LayerTape& tape,
                at::Tensor& d_TH) const;

 private:
  // Returns views of the heads in the fused rows. v is undefined if the rows
  // have only q and k.
  ops::Heads SplitHeads(const at::Tensor& qkv_TW) const;
  // Returns a view of the output gates [T, Q, C] in the fused rows.
  at::Tensor Gates(const at::Tensor& qkv_TW) const;
  // Returns the heads' output multiplied by the sigmoid of the gates, or the
  // output itself if the model has no gates.
  at::Tensor Gated(const at::Tensor& attended_TW,
                   const at::Tensor& qkv_TW) const;
  // Returns the weights of the head norms, or undefined tensors if the model
  // has none.
  ops::HeadNorms HeadNorms() const;
  // Norms all heads of q together, and all of k, in place. Does nothing unless
  // the model has QkNorm::kWhole.
  void NormWholeQk(at::Tensor& qkv_TW) const;
  // Replaces the gradients of the normed q and k by those of q and k, which
  // `raw_TW` has.
  void NormWholeQkBackward(const at::Tensor& raw_TW, at::Tensor& dqkv_TW) const;
  // Multiplies the queries, or their gradients, by the factors of their
  // positions, if the model has these.
  void ScaleQueries(const Pass& pass, const at::Tensor& q_TQC) const;
  ops::KvSlots SlotsOf(const KvAccess& kv) const;
  // Returns the output of the heads [T, Q, C] from the keys and values in the
  // cache.
  at::Tensor AttendToPages(const at::Tensor& q_TQC, const ops::KvSlots& slots,
                           const KvAccess& kv) const;
  // Returns the output of the heads [T, Q C], before the gates. Norms and
  // rotates q and k of qkv_TW in place.
  at::Tensor Attend(at::Tensor& qkv_TW, const Pass& pass, LayerTape* tape,
                    KvAccess* kv) const;
  // Returns the gradient of qkv_TW, given that of Gated's result.
  at::Tensor AttendBackward(const at::Tensor& d_gated_TW,
                            const BackwardPass& pass, LayerTape& tape) const;
  // Writes the gradient of the gates to dqkv_TW, and returns that of Attend's
  // result.
  at::Tensor GatedBackward(const at::Tensor& d_gated_TW, const LayerTape& tape,
                           const at::Tensor& dqkv_TW) const;
  const ops::AttentionRule& rule() const {
    return layer_.config.attention[layer_.index].rule;
  }

  const Layer layer_;
};

// The second part of a layer: the MLP, or the experts that replace it. The
// references in `layer` outlive the object. Threads: engine thread.
class Mlp {
 public:
  explicit Mlp(const Layer& layer) : layer_(layer) {}

  // `mid` is the stream that Attention::Forward returns. Returns the stream
  // after the MLP, with the norm next_norm_H, or without a norm if next_norm_H
  // is undefined. `tape` may be null. `experts_TK` is as for
  // ForwardExperts.
  Stream Forward(Stream mid, const at::Tensor& next_norm_H, const Pass& pass,
                 LayerTape* tape, at::Tensor& experts_TK) const;
  // Fills the tape for Backward. The caller has set tape.x_mid_TH and, in a
  // layer with experts, tape.experts_TK. Computes the output of the MLP only if
  // Backward reads it.
  void Recompute(at::Tensor normed_TH, const Pass& pass, LayerTape& tape) const;
  // Replaces d_TH, the gradient of the residual stream after the MLP, by the
  // gradient of the stream before the MLP. Adds to pass.gradients.
  void Backward(const BackwardPass& pass, LayerTape& tape,
                at::Tensor& d_TH) const;

 private:
  // Returns the output of the MLP, summed over ranks.
  at::Tensor Output(at::Tensor normed_TH, const Pass& pass, LayerTape* tape,
                    at::Tensor& experts_TK) const;
  at::Tensor GateUp(at::Tensor normed_TH, const Pass& pass,
                    LayerTape* tape) const;
  at::Tensor Down(const at::Tensor& gate_up_T2F, const Pass& pass,
                  LayerTape* tape) const;
  // Returns the gradient of normed_TH in a layer without experts, before the
  // sum over ranks.
  at::Tensor DenseBackward(const BackwardPass& pass, LayerTape& tape,
                           const at::Tensor& dy_TH) const;
  ExpertLayer experts() const;

  const Layer layer_;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_LAYER_H_
