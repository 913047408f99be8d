// Attention on a CPU by blocks of query rows, each with only the keys that at
// least one of its rows may see (attention_blocks.h). Private to src/ops.
//
// LibTorch's kernel for a CPU multiplies queries with all keys and then masks
// half of the scores. It has no windows, no softcaps and no prefix trees. Here
// a block takes its keys in chunks, whose results are merged in order.
// The query heads that share a key head are multiplied with its keys in one
// product. The bits of a tree's rows do not depend on other trees or on the
// number of threads.
#ifndef WEFT_SRC_OPS_BLOCKED_ATTENTION_H_
#define WEFT_SRC_OPS_BLOCKED_ATTENTION_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/ops/attention_blocks.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {

// The inputs of the forward and the backward pass.
struct AttentionInputs {
  const at::Tensor& q_THC;
  const at::Tensor& k_TKC;
  const at::Tensor& v_TKC;
  const AttentionRule& rule;
};

// The outputs of the backward pass. Only the flash kernels take undefined
// tensors; see TreeAttentionBackward.
struct AttentionGradients {
  at::Tensor& dq_THC;
  at::Tensor& dk_TKC;
  at::Tensor& dv_TKC;
};

// Returns whether the tensor is f32 or f64 on a CPU.
bool BlockedSupports(const at::Tensor& q_THC);

// Returns how many query rows a block should have at most, so that its products
// have an efficient size.
int64_t BlockRows(const AttentionInputs& inputs);

// Writes the output and the log-sum-exp of all query rows to `result`. The
// softmax is without sinks.
void BlockedAttention(const AttentionInputs& inputs,
                      const std::vector<AttentionBlock>& blocks,
                      AttentionOutput& result);

// Writes the gradients; see TreeAttentionBackward.
void BlockedAttentionBackward(const at::Tensor& dout_THC,
                              const AttentionInputs& inputs,
                              const AttentionOutput& forward,
                              const std::vector<AttentionBlock>& blocks,
                              AttentionGradients gradients);

// Returns an upper bound on the bytes that the backward pass allocates for its
// extra sums of dk and dv. The outputs are not counted. Each sum has `num_rows`
// rows of `kv_width` = K C elements.
int64_t BlockedBackwardBytes(int64_t num_rows, int64_t kv_width,
                             int64_t element_bytes);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_BLOCKED_ATTENTION_H_
