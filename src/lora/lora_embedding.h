// The embedding of tokens whose rows belong to different adapters:
//   x = s (E[t] + scale_a A_a[:, t]^T B_a^T)   for the rows of adapter a.
// E[t] is the base model's embedding of token t. Models that scale their
// embeddings have a factor s other than 1. As in PEFT, the column of the
// padding token in A does not learn.
//
// Legend: T packed tokens, n tokens of a segment, U distinct tokens of a
// segment, R rank, H hidden, V vocabulary, N parameters of an adapter. A is [R,
// V], B is [H, R].
#ifndef WEFT_SRC_LORA_LORA_EMBEDDING_H_
#define WEFT_SRC_LORA_LORA_EMBEDDING_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"

namespace weft::lora {

// Adds the adapters' part to x_TH, which holds s E[t].
// Shapes:  tokens_T [T] i64; x_TH [T, H], in the dtype of the adapters' compute
// copy.
// Errors:  throws c10::Error.   Threads: engine thread only.
void AddLoraEmbedding(const at::Tensor& tokens_T, const LoraRouting& routing,
                      double embedding_scale, at::Tensor& x_TH);

// Returns whether any of the gradients belongs to an adapter that adapts the
// embedding.
bool TrainsEmbedding(const LoraGradients& gradients);

// Adds dLoss/dA and dLoss/dB of each segment to the gradient [N] of its
// version, if `gradients` has that version. Adds nothing to the column
// `padding` of A; -1: there is none. Always sums the rows of a token in the
// same order.
// Shapes:  dx_TH like x_TH.
void LoraEmbeddingBackward(const at::Tensor& dx_TH, const at::Tensor& tokens_T,
                           const LoraRouting& routing,
                           const LoraGradients& gradients,
                           double embedding_scale, int64_t padding);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_EMBEDDING_H_
