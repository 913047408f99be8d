// The first part of a layer with a gated delta rule, in place of attention.
//
// Legend: T packed tokens, W the width of all input projections (q | k | v | z
// | b | a), H value heads, V value features.
#ifndef WEFT_SRC_MODEL_DELTA_LAYER_H_
#define WEFT_SRC_MODEL_DELTA_LAYER_H_

#include <ATen/core/Tensor.h>

#include "src/model/layer.h"
#include "src/model/packed_batch.h"
#include "src/ops/gated_delta.h"

namespace weft::model {

// Returns the trees of a pass. Empty if no layer has the rule, or the pass
// decodes.
ops::DeltaTrees DeltaTreesOf(const model_config::ModelConfig& config,
                             const PackedBatch& batch, const KvAccess* kv);

// The product with the input projections, the rule (ops/gated_delta.h), the
// norm of its output, gated by z, and the product with the output projection.
// The references in `layer` outlive the object. Threads: engine thread.
class DeltaAttention {
 public:
  explicit DeltaAttention(const Layer& layer) : layer_(layer) {}

  // As Attention::Forward and Attention::Backward. `kv` has the states of the
  // sequences, and the pass replaces them.
  Stream Forward(Stream stream, const Pass& pass, LayerTape* tape,
                 KvAccess* kv) const;
  void Backward(const BackwardPass& pass, LayerTape& tape,
                at::Tensor& d_TH) const;

 private:
  ops::DeltaParameters Parameters() const;
  // Return views of the rows: the inputs of the rule, and z [T, H, V].
  ops::DeltaInputs RuleInputs(const at::Tensor& inputs_TW) const;
  at::Tensor OutputGates(const at::Tensor& inputs_TW) const;
  // Returns the rule's output [T, H, V].
  at::Tensor Run(const at::Tensor& inputs_TW, const Pass& pass, LayerTape* tape,
                 const KvAccess* kv) const;
  // Returns the normed output [T, H V].
  at::Tensor Normed(const at::Tensor& out_THV,
                    const at::Tensor& inputs_TW) const;

  const Layer layer_;
};

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_DELTA_LAYER_H_
