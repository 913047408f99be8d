// Paged attention by the CPU's kernel; see paged_attention.h. Private to
// src/ops.
#ifndef WEFT_SRC_OPS_PAGED_ATTENTION_CPU_H_
#define WEFT_SRC_OPS_PAGED_ATTENTION_CPU_H_

#include <ATen/core/Tensor.h>

#include "src/ops/attention_rule.h"

namespace weft::ops {

// Computes PagedAttention of f32 tensors on the CPU. The caller has checked the
// arguments, and there is at least one sequence. The bits of a sequence depend
// neither on the batch nor on the number of threads.
void PagedAttentionCpu(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                       const at::Tensor& v_pages_PSKC,
                       const at::Tensor& page_table_BL,
                       const at::Tensor& lengths_B, const AttentionRule& rule,
                       const at::Tensor& sinks_H, at::Tensor& out_BHC);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_PAGED_ATTENTION_CPU_H_
