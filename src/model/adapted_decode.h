// Decodes with adapters on CUDA. The launches of a layer that are not base
// products or attention each do all that lies between two of these, so that a
// layer takes 10 launches (lora/lora_decode_cuda.h). Passes that cannot run
// this way run attention.h and mlp.h.
//
// The norm of the residual stream is applied after the products that read it.
// So a row's last bits differ from those of the other way.
#ifndef WEFT_SRC_MODEL_ADAPTED_DECODE_H_
#define WEFT_SRC_MODEL_ADAPTED_DECODE_H_

#include <ATen/core/Tensor.h>

#include <functional>

#include "src/model/layer.h"
#include "src/model/packed_batch.h"

namespace weft::model {

// Returns whether the pass can run this way: it decodes in bf16 with a table of
// adapters, of ranks up to 128, in a dense model on one rank, without norms
// after o and down, and with heads of at most 256 features. `layer` is any of
// the model's layers; `kv` may be null.
[[nodiscard]] bool TakesAdaptedDecode(const Layer& layer, const Pass& pass,
                                      const KvAccess* kv);

// Runs all layers. Takes the residual stream, and its norm that the first layer
// reads. Returns the residual stream after the last layer. `layer_at` returns a
// layer by its index. REQUIRES: TakesAdaptedDecode.
[[nodiscard]] at::Tensor DecodeAdapted(
    at::Tensor x_TH, const at::Tensor& normed_TH, const Pass& pass,
    const KvAccess& kv, const std::function<Layer(int index)>& layer_at);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_ADAPTED_DECODE_H_
