#include "src/ops/paged_attention_cpu.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/tree_attention_parts.h"

namespace weft::ops {
namespace {

// The tokens of a sequence are cut into parts, which are computed apart and
// merged in order. How many parts there are depends on the tokens alone, so
// that a sequence has the same bits in every batch and with any number of
// threads. They are as long as 16 times their number at least: longer contexts
// feed more threads, and merging stays a small part of the work.
constexpr int64_t kMaxParts = 16;
constexpr int64_t kPartTokens = 16;

// Tokens [begin, end) that a sequence's newest token sees.
struct Tokens {
  int64_t begin;
  int64_t end;

  [[nodiscard]] int64_t size() const { return end - begin; }
};

Tokens VisibleTokens(int64_t length, int64_t window) {
  return {window > 0 ? std::max<int64_t>(0, length - window) : 0, length};
}

int64_t NumParts(const Tokens& tokens) {
  int64_t parts = 1;
  while (parts < kMaxParts &&
         tokens.size() >= kPartTokens * (2 * parts) * (2 * parts)) {
    parts *= 2;
  }
  return parts;
}

// One piece of work: a part of a sequence's tokens, for some of its key/value
// heads.
struct Piece {
  int64_t b = 0;
  int64_t part = 0;
  Tokens tokens;
  int64_t first_head = 0;
  int64_t num_heads = 0;
};

// The attention of one batch on the CPU.
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
      visible_.push_back(VisibleTokens(lengths[b], rule.window));
      parts_.push_back(NumParts(visible_.back()));
    }
  }

  [[nodiscard]] int64_t max_parts() const {
    return *std::ranges::max_element(parts_);
  }

  // Writes out [B, H, C] and lse [max_parts, B, H], whose first part is that of
  // all tokens. `others` has room for the outputs of the other parts.
  void Run(float* out, float* lse, float* others) const {
    const std::vector<Piece> pieces = Pieces();
    at::parallel_for(0, std::ssize(pieces), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        RunPiece(pieces[i], out, lse, others);
      }
    });
    if (max_parts() == 1) return;
    at::parallel_for(0, batch(), RowGrain(max_parts() * heads_ * features_),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t b = begin; b < end; ++b) {
                         MergeParts(b, out, lse, others);
                       }
                     });
  }

 private:
  [[nodiscard]] int64_t batch() const { return std::ssize(parts_); }

  // All heads of a part are one piece, because their keys and values are
  // adjacent in memory. Only if threads would be idle are there more pieces.
  [[nodiscard]] std::vector<Piece> Pieces() const {
    const int64_t num_parts =
        std::accumulate(parts_.begin(), parts_.end(), int64_t{0});
    const int64_t threads = at::get_num_threads();
    const int64_t groups =
        std::min(item_.num_kv_heads, (threads + num_parts - 1) / num_parts);
    const int64_t step = (item_.num_kv_heads + groups - 1) / groups;
    std::vector<Piece> pieces;
    pieces.reserve(num_parts * groups);
    for (int64_t b = 0; b < batch(); ++b) {
      for (int64_t part = 0; part < parts_[b]; ++part) {
        for (int64_t k = 0; k < item_.num_kv_heads; k += step) {
          pieces.push_back(
              {.b = b,
               .part = part,
               .tokens = TokensOfPart(b, part),
               .first_head = k,
               .num_heads = std::min(step, item_.num_kv_heads - k)});
        }
      }
    }
    return pieces;
  }

  [[nodiscard]] Tokens TokensOfPart(int64_t b, int64_t part) const {
    const Tokens& all = visible_[b];
    return {all.begin + all.size() * part / parts_[b],
            all.begin + all.size() * (part + 1) / parts_[b]};
  }

  void RunPiece(const Piece& piece, float* out, float* lse,
                float* others) const {
    const int64_t row = piece.b * heads_ + piece.first_head * item_.group_size;
    const int64_t rows = batch() * heads_;
    kernels::cpu::PagedAttentionItem item = item_;
    lse += piece.part * rows + row;
    if (piece.tokens.size() == 0) {
      std::fill_n(lse, piece.num_heads * item.group_size, -INFINITY);
      return;
    }
    item.begin = piece.tokens.begin;
    item.end = piece.tokens.end;
    item.num_heads = piece.num_heads;
    item.q_NGC += row * features_;
    item.k_pages += piece.first_head * features_;
    item.v_pages += piece.first_head * features_;
    item.page_table = page_table_ + piece.b * table_entries_;
    float* const to =
        piece.part == 0 ? out : others + (piece.part - 1) * rows * features_;
    kernels::cpu::Kernels().paged_attention(item, to + row * features_, lse);
  }

  void MergeParts(int64_t b, float* out, float* lse,
                  const float* others) const {
    const int64_t rows = batch() * heads_, row = b * heads_;
    for (int64_t part = 1; part < parts_[b]; ++part) {
      kernels::cpu::Kernels().lse_merge_rows(
          others + ((part - 1) * rows + row) * features_,
          lse + part * rows + row, heads_, features_, out + row * features_,
          lse + row);
    }
  }

  const int64_t heads_, features_;
  const int32_t* const page_table_;
  const int64_t table_entries_;
  // Only what differs between pieces is not set.
  const kernels::cpu::PagedAttentionItem item_;
  // One entry for each sequence.
  std::vector<Tokens> visible_;
  std::vector<int64_t> parts_;
};

}  // namespace

void PagedAttentionCpu(const at::Tensor& q_BHC, const at::Tensor& k_pages_PSKC,
                       const at::Tensor& v_pages_PSKC,
                       const at::Tensor& page_table_BL,
                       const at::Tensor& lengths_B, const AttentionRule& rule,
                       const at::Tensor& sinks_H, at::Tensor& out_BHC) {
  const at::Tensor q = q_BHC.contiguous();
  const at::Tensor table = page_table_BL.contiguous();
  const at::Tensor lengths = lengths_B.contiguous();
  const Launch launch(q, k_pages_PSKC, v_pages_PSKC, table, lengths, rule);
  const int64_t parts = launch.max_parts();
  at::Tensor lse = at::empty({parts, q.size(0), q.size(1)}, q.options());
  at::Tensor others;
  if (parts > 1) others = at::empty({parts - 1, q.numel()}, q.options());
  launch.Run(out_BHC.mutable_data_ptr<float>(), lse.mutable_data_ptr<float>(),
             parts > 1 ? others.mutable_data_ptr<float>() : nullptr);
  if (!sinks_H.defined()) return;
  at::Tensor lse_BH = lse[0];
  AddSinks(sinks_H, out_BHC, lse_BH);
}

}  // namespace weft::ops
