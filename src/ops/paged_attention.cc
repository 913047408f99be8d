#include "src/ops/paged_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/attention_rule.h"
#include "src/ops/check_argument.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/thread_team.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {
namespace {

using kernels::cpu::kAttentionChunk;

// Tokens [begin, end) that a sequence's newest token sees.
struct Tokens {
  int64_t begin;
  int64_t end;
};

Tokens VisibleTokens(int64_t length, int64_t window) {
  return {window > 0 ? std::max<int64_t>(0, length - window) : 0, length};
}

// A part is what lies in one chunk. A sequence without tokens has one part.
int64_t NumParts(const Tokens& tokens) {
  return std::max<int64_t>(
      1, CeilDiv(tokens.end, kAttentionChunk) - tokens.begin / kAttentionChunk);
}

Tokens TokensOfPart(const Tokens& all, int64_t part) {
  const int64_t chunk = all.begin / kAttentionChunk + part;
  return {std::max(all.begin, chunk * kAttentionChunk),
          std::min(all.end, (chunk + 1) * kAttentionChunk)};
}

// The work of one task: a part of the tokens of sequence `b`, for some of its
// key/value heads.
struct Piece {
  int64_t b = 0;
  int64_t part = 0;
  Tokens tokens = {};
  int64_t first_head = 0;
  int64_t num_heads = 0;
  int64_t work = 0;  // Tokens times heads.
};

// The pieces of one thread. The unit of work is one head of one token.
struct Hand {
  std::vector<Piece> pieces;
  int64_t work = 0;
};

// Computes PagedAttention for one batch.
class Launch {
 public:
  Launch(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
         const at::Tensor& v_pages_PSKC, const at::Tensor& page_table_BL,
         const at::Tensor& lengths_B, const AttentionRule& rule)
      : heads_(q_BHC.size(1)),
        features_(q_BHC.size(2)),
        page_table_(page_table_BL.const_data_ptr<int32_t>()),
        table_entries_(page_table_BL.size(1)),
        item_{.q_NGC = q_BHC.const_data_ptr<float>(),
              .k_pages = k_pages_PSKC.const_data_ptr<float>(),
              .v_pages = v_pages_PSKC.const_data_ptr<float>(),
              .group_size = heads_ / k_pages_PSKC.size(2),
              .num_kv_heads = k_pages_PSKC.size(2),
              .head_features = features_,
              .page_tokens = k_pages_PSKC.size(1),
              .scale = static_cast<float>(rule.scale),
              .softcap = static_cast<float>(rule.softcap)} {
    const auto* lengths = lengths_B.const_data_ptr<int32_t>();
    for (int64_t b = 0; b < q_BHC.size(0); ++b) {
      const Tokens tokens = VisibleTokens(lengths[b], rule.window);
      sequences_.push_back({.tokens = tokens,
                            .num_parts = NumParts(tokens),
                            .later_parts = num_parts_ - b});
      num_parts_ += sequences_.back().num_parts;
    }
  }

  int64_t num_parts() const { return num_parts_; }

  // Writes out [B, H, C] and its log-sum-exp [B, H]. Computes the first part of
  // a sequence there, and the other parts in `parts` [num_parts - B, H, C] and
  // parts_lse [num_parts - B, H].
  void Run(float* out, float* lse, float* parts, float* parts_lse) const {
    const std::vector<Hand> hands = BestHands();
    ParallelFor(std::ssize(hands), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (const Piece& piece : hands[i].pieces) {
          RunPiece(piece, out, lse, parts, parts_lse);
        }
      }
    });
    const auto batch = std::ssize(sequences_);
    if (num_parts_ == batch) return;
    ParallelFor(batch, RowGrain(num_parts_ / batch * row_size()),
                [&](int64_t begin, int64_t end) {
                  for (int64_t b = begin; b < end; ++b) {
                    Merge(b, parts, parts_lse, out + b * row_size(),
                          lse + b * heads_);
                  }
                });
  }

 private:
  struct Sequence {
    Tokens tokens;
    int64_t num_parts = 0;
    int64_t later_parts = 0;  // Where they begin among those of all sequences.
  };

  int64_t row_size() const { return heads_ * features_; }

  // Deals pieces of `step` key/value heads out to the threads, the longest
  // first, each to the thread with the least work.
  std::vector<Hand> Deal(int64_t step) const {
    const int64_t num_heads = item_.num_kv_heads;
    std::vector<Piece> pieces;
    pieces.reserve(num_parts_ * CeilDiv(num_heads, step));
    for (int64_t b = 0; b < std::ssize(sequences_); ++b) {
      for (int64_t part = 0; part < sequences_[b].num_parts; ++part) {
        const Tokens tokens = TokensOfPart(sequences_[b].tokens, part);
        for (int64_t k = 0; k < num_heads; k += step) {
          const int64_t heads = std::min(step, num_heads - k);
          pieces.push_back({.b = b,
                            .part = part,
                            .tokens = tokens,
                            .first_head = k,
                            .num_heads = heads,
                            .work = (tokens.end - tokens.begin) * heads});
        }
      }
    }
    std::ranges::stable_sort(pieces, std::ranges::greater(), &Piece::work);
    std::vector<Hand> hands(at::get_num_threads());
    for (const Piece& piece : pieces) {
      Hand& least = *std::ranges::min_element(hands, {}, &Hand::work);
      least.pieces.push_back(piece);
      least.work += piece.work;
    }
    return hands;
  }

  // A piece with all heads is best, because the keys and values of all heads
  // are adjacent in memory. If threads would be idle with such pieces, pieces
  // get fewer heads.
  std::vector<Hand> BestHands() const {
    std::vector<Hand> best;
    int64_t least = 0;
    for (int64_t step = item_.num_kv_heads; step > 0; step /= 2) {
      std::vector<Hand> hands = Deal(step);
      int64_t busiest = 0, total = 0;
      for (const Hand& hand : hands) {
        busiest = std::max(busiest, hand.work);
        total += hand.work;
      }
      if (best.empty() || busiest < least) {
        least = busiest;
        best = std::move(hands);
      }
      // Stops if the busiest thread has at most 9 / 8 of the average work.
      if (8 * least * std::ssize(best) <= 9 * total) break;
    }
    return best;
  }

  // Writes the rows of the piece's heads; see Run.
  void RunPiece(const Piece& piece, float* out, float* lse, float* parts,
                float* parts_lse) const {
    const Tokens& tokens = piece.tokens;
    const int64_t head = piece.first_head * item_.group_size;
    const int64_t row = piece.part == 0
                            ? piece.b
                            : sequences_[piece.b].later_parts + piece.part - 1;
    if (piece.part > 0) {
      out = parts;
      lse = parts_lse;
    }
    out += row * row_size() + head * features_;
    lse += row * heads_ + head;
    kernels::cpu::PagedAttentionItem item = item_;
    if (tokens.begin == tokens.end) {
      const int64_t num_heads = piece.num_heads * item.group_size;
      std::fill_n(lse, num_heads, -INFINITY);
      std::fill_n(out, num_heads * features_, 0.0F);
      return;
    }
    item.begin = tokens.begin;
    item.end = tokens.end;
    item.num_heads = piece.num_heads;
    item.q_NGC += piece.b * row_size() + head * features_;
    item.k_pages += piece.first_head * features_;
    item.v_pages += piece.first_head * features_;
    item.page_table = page_table_ + piece.b * table_entries_;
    kernels::cpu::Kernels().paged_attention(item, out, lse);
  }

  // Merges the later parts of sequence b into its row of the output.
  void Merge(int64_t b, const float* parts, const float* parts_lse, float* out,
             float* lse) const {
    const Sequence& sequence = sequences_[b];
    for (int64_t i = 0; i + 1 < sequence.num_parts; ++i) {
      const int64_t part = sequence.later_parts + i;
      kernels::cpu::Kernels().lse_merge_rows(parts + part * row_size(),
                                             parts_lse + part * heads_, heads_,
                                             features_, out, lse);
    }
  }

  const int64_t heads_, features_;
  const int32_t* const page_table_;
  const int64_t table_entries_;
  // Holds the values that all pieces share. RunPiece copies the item and sets
  // the values of its piece.
  const kernels::cpu::PagedAttentionItem item_;
  std::vector<Sequence> sequences_;
  int64_t num_parts_ = 0;
};

// Computes PagedAttention of f32 tensors on the CPU. The caller has checked the
// arguments, and there is at least one sequence. The bits of a sequence depend
// neither on the batch nor on the number of threads, and are those of
// BlockedAttention.
void PagedAttentionCpu(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                       const at::Tensor& v_pages_PSKC,
                       const at::Tensor& page_table_BL,
                       const at::Tensor& lengths_B, const AttentionRule& rule,
                       const at::Tensor& sinks_H, at::Tensor& out_BHC) {
  const at::Tensor q = q_BHC.contiguous();
  const at::Tensor table = page_table_BL.contiguous();
  const at::Tensor lengths = lengths_B.contiguous();
  const Launch launch(q, k_pages_PSKC, v_pages_PSKC, table, lengths, rule);
  const int64_t later = launch.num_parts() - q.size(0);
  at::Tensor lse = at::empty({q.size(0), q.size(1)}, q.options());
  const at::Tensor parts_lse = at::empty({later, q.size(1)}, q.options());
  const at::Tensor parts =
      at::empty({later, q.size(1), q.size(2)}, q.options());
  launch.Run(out_BHC.mutable_data_ptr<float>(), lse.mutable_data_ptr<float>(),
             parts.mutable_data_ptr<float>(),
             parts_lse.mutable_data_ptr<float>());
  AddSinks(sinks_H, out_BHC, lse);
}

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

// Copies each row with a slot >= 0 to its slot. LibTorch's indexed copy takes
// longer to set up than to copy the few rows of a decode step.
void WriteRowsCpu(const at::Tensor& x_TKC, const at::Tensor& slots_T,
                  const at::Tensor& pages_PSKC) {
  const int64_t heads = x_TKC.size(1), features = x_TKC.size(2);
  const int64_t num_slots = pages_PSKC.size(0) * pages_PSKC.size(1);
  CheckArgument("slots_T", slots_T, x_TKC, at::kLong, {x_TKC.size(0)});
  CheckArgument("pages_PSKC", pages_PSKC, x_TKC, x_TKC.scalar_type(),
                {pages_PSKC.size(0), pages_PSKC.size(1), heads, features});
  TORCH_CHECK(x_TKC.stride(2) == 1, "the features of heads are not adjacent");
  const int64_t* slots = slots_T.const_data_ptr<int64_t>();
  const int64_t unit = x_TKC.element_size();
  const auto* from = static_cast<const char*>(x_TKC.const_data_ptr());
  auto* to = static_cast<char*>(pages_PSKC.mutable_data_ptr());
  ParallelFor(
      x_TKC.size(0), RowGrain(heads * features),
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          if (slots[t] < 0) continue;
          TORCH_CHECK(slots[t] < num_slots, "slots_T names slot ", slots[t],
                      " of ", num_slots);
          for (int64_t m = 0; m < heads; ++m) {
            std::copy_n(
                from + (t * x_TKC.stride(0) + m * x_TKC.stride(1)) * unit,
                features * unit, to + (slots[t] * heads + m) * features * unit);
          }
        }
      });
}

}  // namespace

void WriteKvPages(const at::Tensor& k_TKC, const at::Tensor& v_TKC,
                  const at::Tensor& slots_T, at::Tensor& k_pages_PSKC,
                  at::Tensor& v_pages_PSKC) {
  if (k_TKC.is_cpu()) {
    WriteRowsCpu(k_TKC, slots_T, k_pages_PSKC);
    WriteRowsCpu(v_TKC, slots_T, v_pages_PSKC);
    return;
  }
  // Reading slots would wait for the device. Batches with padding go to the
  // kernel of PrepareHeads (rotary.h), which skips the padding.
  k_pages_PSKC.flatten(0, 1).index_copy_(0, slots_T, k_TKC);
  v_pages_PSKC.flatten(0, 1).index_copy_(0, slots_T, v_TKC);
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
      return cuda::PagedAttention(q_BHC, k_pages_PSKC, v_pages_PSKC,
                                  page_table_BL, lengths_B, rule, sinks_H,
                                  out_BHC);
    }
  }
  const auto attention =
      HasCpuKernel(q_BHC) ? PagedAttentionCpu : PagedAttentionReference;
  attention(q_BHC, k_pages_PSKC, v_pages_PSKC, page_table_BL, lengths_B, rule,
            sinks_H, out_BHC);
}

}  // namespace weft::ops
