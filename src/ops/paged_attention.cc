#include "src/ops/paged_attention.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/paged_attention_cpu.h"
#include "src/ops/thread_team.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// Computes PagedAttention with ATen on copies of each sequence's pages. Takes
// any dtype and device.
void PagedAttentionReference(const at::Tensor& q_BHC,
                             const at::Tensor& k_pages_PSKC,
                             const at::Tensor& v_pages_PSKC,
                             const at::Tensor& page_table_BL,
                             const at::Tensor& lengths_B,
                             const AttentionRule& rule,
                             const at::Tensor& sinks_H, at::Tensor& out_BHC) {
  const int64_t batch = q_BHC.size(0);
  const int64_t heads = q_BHC.size(1);
  const int64_t page_tokens = k_pages_PSKC.size(1);
  const int64_t kv_heads = k_pages_PSKC.size(2);
  const int64_t C = q_BHC.size(2);
  const int64_t max_length = lengths_B.max().item<int64_t>();
  const int64_t pages = (max_length + page_tokens - 1) / page_tokens;
  const at::Tensor tokens_1T =
      at::arange(pages * page_tokens, lengths_B.options()).unsqueeze(0);
  const at::Tensor lengths_B1 = lengths_B.unsqueeze(1);
  at::Tensor mask_BT = tokens_1T < lengths_B1;
  if (rule.window > 0) {
    mask_BT.logical_and_(tokens_1T >= lengths_B1 - rule.window);
  }
  // Table entries of pages without visible tokens may have any value, so page 0
  // is read instead.
  const at::Tensor needed_BL = mask_BT.view({batch, pages, page_tokens}).any(2);
  const at::Tensor table =
      at::where(needed_BL, page_table_BL.narrow(1, 0, pages), 0).flatten();
  const at::ScalarType compute = ComputeType(q_BHC);
  const auto gather = [&](const at::Tensor& all_pages) {
    at::Tensor rows = all_pages.index_select(0, table)
                          .view({batch, pages * page_tokens, kv_heads, 1, C})
                          .to(compute);
    // Clears the rows of hidden tokens, because unwritten slots may hold NaN,
    // and a weight of 0 times NaN is NaN.
    rows =
        rows.masked_fill(mask_BT.logical_not().view({batch, -1, 1, 1, 1}), 0);
    return rows.permute({0, 2, 3, 1, 4});  // [B, K, 1, T, C]
  };
  const at::Tensor q =
      q_BHC.to(compute).view({batch, kv_heads, heads / kv_heads, 1, C});
  at::Tensor scores =
      at::matmul(q, gather(k_pages_PSKC).transpose(-1, -2)) * rule.scale;
  if (rule.softcap > 0) scores.div_(rule.softcap).tanh_().mul_(rule.softcap);
  scores.masked_fill_(mask_BT.logical_not().view({batch, 1, 1, 1, -1}),
                      -INFINITY);
  at::Tensor sums_BHC = at::matmul(scores.softmax(-1), gather(v_pages_PSKC))
                            .reshape({batch, heads, C});
  if (sinks_H.defined()) {
    at::Tensor lse_BH = scores.logsumexp(-1).reshape({batch, heads});
    AddSinks(sinks_H, sums_BHC, lse_BH);
  }
  // Padding sees no token, so its softmax is NaN. Writes zeros instead.
  out_BHC.copy_(sums_BHC.masked_fill_((lengths_B == 0).view({-1, 1, 1}), 0));
}

void CheckArguments(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                    const at::Tensor& v_pages_PSKC,
                    const at::Tensor& page_table_BL,
                    const at::Tensor& lengths_B, const at::Tensor& out_BHC) {
  TORCH_CHECK(
      q_BHC.dim() == 3 && k_pages_PSKC.dim() == 4 && page_table_BL.dim() == 2,
      "paged attention wants q_BHC, k_pages_PSKC and page_table_BL, "
      "got ",
      q_BHC.sizes(), ", ", k_pages_PSKC.sizes(), " and ",
      page_table_BL.sizes());
  const at::ScalarType dtype = q_BHC.scalar_type();
  const int64_t batch = q_BHC.size(0);
  const int64_t kv_heads = k_pages_PSKC.size(2);
  TORCH_CHECK(kv_heads > 0 && q_BHC.size(1) % kv_heads == 0, "q_BHC has ",
              q_BHC.size(1), " heads, no multiple of the ", kv_heads,
              " of k_pages_PSKC");
  CheckArgument(
      "k_pages_PSKC", k_pages_PSKC, q_BHC, dtype,
      {k_pages_PSKC.size(0), k_pages_PSKC.size(1), kv_heads, q_BHC.size(2)});
  CheckArgument("v_pages_PSKC", v_pages_PSKC, q_BHC, dtype,
                k_pages_PSKC.sizes());
  CheckArgument("page_table_BL", page_table_BL, q_BHC, at::kInt,
                {batch, page_table_BL.size(1)}, Layout::kAny);
  CheckArgument("lengths_B", lengths_B, q_BHC, at::kInt, {batch}, Layout::kAny);
  CheckArgument("out_BHC", out_BHC, q_BHC, dtype, q_BHC.sizes());
}

// Returns the numbers of the rows with a slot >= 0, or an undefined tensor if
// all rows have one. Does not read slots on a CUDA device, because the read
// would wait for the device. Instead assumes that no slot is negative: batches
// with padding go to the kernel of PrepareHeads (ops/rotary.h), which skips the
// padding.
at::Tensor RowsWithSlots(const at::Tensor& slots_T) {
  if (!slots_T.is_cpu()) return {};
  const int64_t* slots = slots_T.const_data_ptr<int64_t>();
  std::vector<int64_t> rows;
  for (int64_t t = 0; t < slots_T.numel(); ++t) {
    if (slots[t] >= 0) rows.push_back(t);
  }
  if (static_cast<int64_t>(rows.size()) == slots_T.numel()) return {};
  return ToDevice(rows, slots_T.device());
}

// Copies each row with a slot >= 0 to its slot. LibTorch's indexed copy takes
// longer to set up than to copy the few rows of a decode step.
void WriteRowsCpu(const at::Tensor& x_TKC, const at::Tensor& slots_T,
                  const at::Tensor& pages_PSKC) {
  const int64_t heads = x_TKC.size(1), features = x_TKC.size(2);
  const int64_t num_slots = pages_PSKC.size(0) * pages_PSKC.size(1);
  const int64_t* slots = slots_T.const_data_ptr<int64_t>();
  const auto* from = x_TKC.const_data_ptr<float>();
  auto* to = pages_PSKC.mutable_data_ptr<float>();
  ParallelFor(x_TKC.size(0), RowGrain(heads * features),
              [&](int64_t begin, int64_t end) {
                for (int64_t t = begin; t < end; ++t) {
                  if (slots[t] < 0) continue;
                  TORCH_CHECK(slots[t] < num_slots, "slots_T names slot ",
                              slots[t], " of ", num_slots);
                  for (int64_t m = 0; m < heads; ++m) {
                    std::copy_n(
                        from + t * x_TKC.stride(0) + m * x_TKC.stride(1),
                        features, to + (slots[t] * heads + m) * features);
                  }
                }
              });
}

bool TakesRowsCpu(const at::Tensor& x_TKC, const at::Tensor& slots_T,
                  const at::Tensor& pages_PSKC) {
  return HasCpuKernel(x_TKC) && HasCpuKernel(pages_PSKC) &&
         x_TKC.stride(2) == 1 && pages_PSKC.is_contiguous() &&
         slots_T.is_contiguous() && slots_T.numel() == x_TKC.size(0) &&
         x_TKC.sizes().slice(1) == pages_PSKC.sizes().slice(2);
}

}  // namespace

void WriteKvPages(const at::Tensor& k_TKC, const at::Tensor& v_TKC,
                  const at::Tensor& slots_T, at::Tensor& k_pages_PSKC,
                  at::Tensor& v_pages_PSKC) {
  if (TakesRowsCpu(k_TKC, slots_T, k_pages_PSKC) &&
      TakesRowsCpu(v_TKC, slots_T, v_pages_PSKC)) {
    WriteRowsCpu(k_TKC, slots_T, k_pages_PSKC);
    WriteRowsCpu(v_TKC, slots_T, v_pages_PSKC);
    return;
  }
  const at::Tensor rows = RowsWithSlots(slots_T);
  const auto write = [&](const at::Tensor& x_TKC, at::Tensor& pages_PSKC) {
    at::Tensor slots = pages_PSKC.flatten(0, 1);
    if (rows.defined()) {
      slots.index_copy_(0, slots_T.index_select(0, rows),
                        x_TKC.index_select(0, rows));
    } else {
      slots.index_copy_(0, slots_T, x_TKC);
    }
  };
  write(k_TKC, k_pages_PSKC);
  write(v_TKC, v_pages_PSKC);
}

void PagedAttention(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                    const at::Tensor& v_pages_PSKC,
                    const at::Tensor& page_table_BL,
                    const at::Tensor& lengths_B, const AttentionRule& rule,
                    at::Tensor& out_BHC, const at::Tensor& sinks_H) {
  CheckArguments(q_BHC, k_pages_PSKC, v_pages_PSKC, page_table_BL, lengths_B,
                 out_BHC);
  CheckSinks(sinks_H, q_BHC);
  if (q_BHC.numel() == 0) return;
  if constexpr (kHasCudaKernels) {
    if (cuda::TakesPagedAttention(q_BHC)) {
      cuda::PagedAttention(q_BHC, k_pages_PSKC, v_pages_PSKC, page_table_BL,
                           lengths_B, rule, sinks_H, out_BHC);
      return;
    }
  }
  const auto attention =
      HasCpuKernel(q_BHC) ? PagedAttentionCpu : PagedAttentionReference;
  attention(q_BHC, k_pages_PSKC, v_pages_PSKC, page_table_BL, lengths_B, rule,
            sinks_H, out_BHC);
}

}  // namespace weft::ops
