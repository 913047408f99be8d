// The implementations of tree and suffix attention, and what they share.
// Private to src/ops.
#ifndef WEFT_SRC_OPS_TREE_ATTENTION_PARTS_H_
#define WEFT_SRC_OPS_TREE_ATTENTION_PARTS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/ops/suffix_attention.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {

// `q_size` consecutive query rows and `k_size` consecutive key rows.
struct AttentionPart {
  int64_t q_begin = 0;
  int64_t q_size = 0;
  int64_t k_begin = 0;
  int64_t k_size = 0;
};

// Returns the parts in which every node attends causally to itself. The parts
// cover all rows in order.
[[nodiscard]] std::vector<AttentionPart> SelfParts(
    const std::vector<AttentionNode>& nodes);

// Returns the parts in which descendants' rows attend to an ancestor's rows,
// one list for each depth of the ancestor. The query rows of one list are
// disjoint.
[[nodiscard]] std::vector<std::vector<AttentionPart>> AncestorParts(
    const std::vector<AttentionNode>& nodes);

// Merges `part` into `out` and `lse`, two attention results over disjoint keys.
// Shapes: [N, H, C], [N, H].
void MergeByLse(const AttentionOutput& part, at::Tensor& out_NHC,
                at::Tensor& lse_NH);

// Returns uninitialised memory for the output of attention with queries q_THC.
[[nodiscard]] AttentionOutput EmptyOutput(const at::Tensor& q_THC);

// Throws c10::Error unless the sinks are undefined or fit q_THC.
void CheckSinks(const at::Tensor& sinks_H, const at::Tensor& q_THC);

// Adds exp(sink) to the sum of each head's softmax: shrinks `out` and raises
// `lse`. Does nothing if the sinks are undefined. Shapes: [H], [N, H, C], [N,
// H].
void AddSinks(const at::Tensor& sinks_H, at::Tensor& out_NHC,
              at::Tensor& lse_NH);

// The inputs of the forward and the backward pass.
struct AttentionInputs {
  const at::Tensor& q_THC;
  const at::Tensor& k_TKC;
  const at::Tensor& v_TKC;
  const AttentionRule& rule;
};

// The outputs of the backward pass. Only VarlenTreeAttentionBackward takes
// undefined tensors; see TreeAttentionBackward.
struct AttentionGradients {
  at::Tensor& dq_THC;
  at::Tensor& dk_TKC;
  at::Tensor& dv_TKC;
};

// These functions use the CUDA flash kernels, with one call for all nodes and
// one for each level of ancestors; see tree_attention_varlen.cc.
[[nodiscard]] bool VarlenSupports(const at::Tensor& q_THC);
[[nodiscard]] AttentionOutput VarlenTreeAttention(
    const AttentionInputs& inputs, const std::vector<AttentionNode>& nodes);
void VarlenTreeAttentionBackward(const at::Tensor& dout_THC,
                                 const AttentionInputs& inputs,
                                 const AttentionOutput& forward,
                                 const std::vector<AttentionNode>& nodes,
                                 AttentionGradients gradients);

// Computes all sequences in one call.
[[nodiscard]] AttentionOutput VarlenSuffixAttention(
    const AttentionInputs& inputs, const std::vector<SuffixRows>& sequences);

// These functions use plain matrix products, for any rule; see
// tree_attention_eager.cc.
[[nodiscard]] AttentionOutput EagerTreeAttention(
    const AttentionInputs& inputs, const std::vector<AttentionNode>& nodes);
void EagerTreeAttentionBackward(const at::Tensor& dout_THC,
                                const AttentionInputs& inputs,
                                const AttentionOutput& forward,
                                const std::vector<AttentionNode>& nodes,
                                AttentionGradients gradients);

void EagerSuffixAttention(const AttentionInputs& inputs,
                          const std::vector<SuffixRows>& sequences,
                          AttentionOutput& result);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_TREE_ATTENTION_PARTS_H_
