// The first part of a layer: the product with q, k and v, the norms and the
// rotation of the heads, attention, and the product with o.
//
// Legend: T packed tokens, H hidden, Q query heads, K key/value heads, C head
// features, W the fused width (Q + 2K) C.
#ifndef WEFT_SRC_MODEL_ATTENTION_H_
#define WEFT_SRC_MODEL_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include "src/model/layer.h"
#include "src/model/packed_batch.h"
#include "src/model/residual.h"
#include "src/model/tape.h"
#include "src/ops/rotary.h"

namespace weft::model {

// Computes the first part of one layer. The references in `layer` outlive the
// object. Threads: engine thread.
class Attention {
 public:
  explicit Attention(const Layer& layer) : layer_(layer) {}

  // stream.normed_TH is the input of q, k and v. Returns the stream after
  // attention, where normed_TH is the input of the MLP. `tape` and `kv` may be
  // null.
  [[nodiscard]] Stream Forward(Stream stream, const Pass& pass, LayerTape* tape,
                               KvAccess* kv) const;
  // Replaces d_TH, the gradient of the residual stream after attention, by the
  // gradient of the stream before attention. The first layer does so only if an
  // adapter trains the embedding. Adds to pass.gradients.
  void Backward(const BackwardPass& pass, LayerTape& tape,
                at::Tensor& d_TH) const;

 private:
  // Returns views of the heads in the fused rows. v is undefined if the rows
  // have only q and k.
  [[nodiscard]] ops::Heads SplitHeads(const at::Tensor& qkv_TW) const;
  // Returns the weights of the head norms, or undefined tensors if the model
  // has none.
  [[nodiscard]] ops::HeadNorms HeadNorms() const;
  [[nodiscard]] ops::KvSlots SlotsOf(const KvAccess& kv) const;
  // Returns the output of the heads [T, Q, C] from the keys and values in the
  // cache.
  [[nodiscard]] at::Tensor AttendToPages(const at::Tensor& q_TQC,
                                         const ops::KvSlots& slots,
                                         const KvAccess& kv) const;
  // Returns the output of the heads [T, Q C].
  [[nodiscard]] at::Tensor Attend(const at::Tensor& qkv_TW, const Pass& pass,
                                  LayerTape* tape, KvAccess* kv) const;
  // Returns the gradient of qkv_TW, given that of Attend's result.
  [[nodiscard]] at::Tensor AttendBackward(const at::Tensor& d_attended_TW,
                                          const BackwardPass& pass,
                                          LayerTape& tape) const;
  [[nodiscard]] const ops::AttentionRule& rule() const {
    return layer_.config.attention[layer_.index].rule;
  }

  const Layer layer_;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_ATTENTION_H_
