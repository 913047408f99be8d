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

// Holds references only. Threads: engine thread.
class Attention {
 public:
  explicit Attention(const Layer& layer) : layer_(layer) {}

  // Takes the stream with the norm that attention reads. Returns it with the
  // norm that the MLP reads. `tape` and `kv` may be null.
  [[nodiscard]] Stream Forward(Stream stream, const Pass& pass, LayerTape* tape,
                               KvAccess* kv) const;
  // Adds to d_TH, the gradient of the residual stream.
  void Backward(const BackwardPass& pass, LayerTape& tape,
                at::Tensor& d_TH) const;

  // The parts of Forward that adapted_decode.h uses.

  // Returns views of the heads inside a fused row, which may end before v.
  [[nodiscard]] ops::Heads SplitHeads(const at::Tensor& qkv_TW) const;
  // The weights are undefined for models without head norms.
  [[nodiscard]] ops::HeadNorms HeadNorms() const;
  [[nodiscard]] ops::KvSlots SlotsOf(const KvAccess& kv) const;
  // Returns the output of the heads [T, Q, C].
  [[nodiscard]] at::Tensor AttendToPages(const at::Tensor& q_TQC,
                                         const ops::KvSlots& slots,
                                         const KvAccess& kv) const;

 private:
  // Returns the output of the heads [T, Q C].
  [[nodiscard]] at::Tensor Attend(const at::Tensor& qkv_TW, const Pass& pass,
                                  LayerTape* tape, KvAccess* kv) const;
  // Returns the gradient of Attend's input, given that of its output.
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
