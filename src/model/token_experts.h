// Reads the experts that a batch gives for its tokens in one layer, and stores
// the experts of tokens in the cache.
//
// Legend: T tokens, K experts per token.
#ifndef WEFT_SRC_MODEL_TOKEN_EXPERTS_H_
#define WEFT_SRC_MODEL_TOKEN_EXPERTS_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"
#include "src/model/packed_batch.h"

namespace weft::model {

// Returns the experts [T, K] i64 that the batch gives to a layer, or an
// undefined tensor if it gives none. At an entry of -1, the batch gives no
// expert.
[[nodiscard]] at::Tensor GivenExperts(const PackedBatch& batch, int layer,
                                      const lora::ExpertShape& experts);

// Writes a layer's experts [T, K] i64 to the tokens' slots in the cache.
// Errors:  throws c10::Error.
void KeepExperts(const at::Tensor& experts_TK, int layer,
                 const lora::ExpertShape& experts, const KvAccess& kv);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_TOKEN_EXPERTS_H_
