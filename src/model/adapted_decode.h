// Decodes with adapters on CUDA. A layer has five main steps: four base
// products and attention. After each of them, one launch does the work up to
// the next main step (lora/lora_decode_cuda.h). Other passes run attention.h
// and mlp.h.
//
// The factor 1 / rms of a norm is applied after the products that read the
// norm. So the last bits of a row may differ from those of other passes.
#ifndef WEFT_SRC_MODEL_ADAPTED_DECODE_H_
#define WEFT_SRC_MODEL_ADAPTED_DECODE_H_

#include <ATen/core/Tensor.h>

#include <functional>

#include "src/model/layer.h"
#include "src/model/packed_batch.h"

namespace weft::model {

// Returns whether DecodeAdapted supports the pass. The pass must decode in bf16
// with a table of adapters of ranks up to 128. The model must be dense, without
// a tensor group, without norms after o and down, and with heads of at most 256
// features. `layer` is any of the model's layers; `kv` may be null.
[[nodiscard]] bool TakesAdaptedDecode(const Layer& layer, const Pass& pass,
                                      const KvAccess* kv);

// Runs all layers. `x_TH` is the residual stream, and `normed_TH` is x_TH after
// the input norm of the first layer. Returns the residual stream after the last
// layer. `layer_at` returns a layer by its index. REQUIRES: TakesAdaptedDecode.
[[nodiscard]] at::Tensor DecodeAdapted(
    at::Tensor x_TH, const at::Tensor& normed_TH, const Pass& pass,
    const KvAccess& kv, const std::function<Layer(int index)>& layer_at);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_ADAPTED_DECODE_H_
