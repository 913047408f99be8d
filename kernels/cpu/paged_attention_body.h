// Implements paged_attention of kernels.h: the products of panel_product with
// keys and values where the pages have them, and softmax_row between the two.
// So the bits are those of the products of whole matrices. Compiled only in
// table_*.cc.
#ifndef WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
#define WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_

#include "kernels/cpu/attention_rows_body.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/panel_copy_body.h"
#include "kernels/cpu/panel_product_body.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The most query heads that AttendHeads computes at a time.
constexpr int64_t kMaxHeads = 32;

// Consecutive tokens, whose keys fill one panel.
struct TokenGroup {
  int64_t begin = 0;
  int64_t count = 0;
  // Floats from the first row of the pages to the token's row.
  int64_t offsets[kPanelColumns];

  int64_t end() const { return begin + count; }
};

WEFT_INLINE TokenGroup GroupAt(const PagedAttentionItem& item, int64_t begin) {
  TokenGroup group{.begin = begin,
                   .count = Smaller(kPanelColumns, item.end - begin)};
  const int64_t stride = item.num_kv_heads * item.head_features;
  int64_t page = begin / item.page_tokens;
  int64_t row = begin % item.page_tokens;
  for (int64_t i = 0; i < group.count; ++i) {
    group.offsets[i] =
        (item.page_table[page] * item.page_tokens + row) * stride;
    if (++row == item.page_tokens) {
      row = 0;
      ++page;
    }
  }
  return group;
}

// Prefetches `size` floats of a token's row. The model's weights have evicted
// the row since the last decode step, and the hardware does not prefetch it,
// because the rows of a head are not adjacent. Callers spread the prefetches
// over their work, because a core keeps only so many lines in flight.
WEFT_INLINE void FetchRow(const float* row, int64_t size) {
  for (int64_t c = 0; c < size; c += kLinePart) __builtin_prefetch(row + c);
}

// Copies `num_features` features of the group's keys to a panel. Columns after
// the last token get some token's key. Meanwhile prefetches the next group.
WEFT_INLINE void CopyKeys(const float* keys, const TokenGroup& group,
                          const TokenGroup& next, int64_t num_features,
                          int64_t width, float* panel) {
  for (int64_t t = 0; t < width; t += 4) {
    const float* row[4];
    for (int64_t i = 0; i < 4; ++i) {
      row[i] = keys + group.offsets[Smaller(t + i, group.count - 1)];
      if (t + i < next.count)
        FetchRow(keys + next.offsets[t + i], num_features);
    }
    int64_t c = 0;
    for (; c + 4 <= num_features; c += 4) {
      StoreSquare(panel + c * width + t, width,
                  Transpose({{LoadQuad(row[0] + c), LoadQuad(row[1] + c),
                              LoadQuad(row[2] + c), LoadQuad(row[3] + c)}}));
    }
    for (; c < num_features; ++c) {
      for (int64_t i = 0; i < 4; ++i) panel[c * width + t + i] = row[i][c];
    }
  }
}

// Writes the scaled scores of the group's tokens for the query heads of
// key/value head n to scores [N G, kAttentionChunk].
WEFT_INLINE void ScoreGroup(const PagedAttentionItem& item,
                            const TokenGroup& group, const TokenGroup& next,
                            int64_t n, float* scores) {
  const int64_t features = item.head_features;
  const int64_t width = RoundUp(group.count);
  float panel[kPartTerms * kPanelColumns];
  for (int64_t c = 0; c < features; c += kPartTerms) {
    const int64_t terms = Smaller(kPartTerms, features - c);
    CopyKeys(item.k_pages + n * features + c, group, next, terms, width, panel);
    RunPanelProduct({.left_MK = item.q_NGC + n * item.group_size * features + c,
                     .m_stride = features,
                     .right_KN = panel,
                     .num_rows = item.group_size,
                     .num_terms = terms,
                     .num_columns = group.count,
                     .scale = item.scale,
                     .adds = c > 0,
                     .out_MN = scores + n * item.group_size * kAttentionChunk,
                     .out_stride = kAttentionChunk});
  }
}

// Adds the group's values, times the weights, to the rows of `out` of the query
// heads of key/value head n. `weights` are those of the group's first token.
WEFT_INLINE void AddValues(const PagedAttentionItem& item,
                           const TokenGroup& group, const TokenGroup& next,
                           int64_t n, const float* weights, float* out_NGC) {
  const int64_t features = item.head_features;
  const int64_t stride = item.num_kv_heads * features;
  const float* const values = item.v_pages + n * features;
  int64_t end = 0;
  for (int64_t t = 0; t < group.count; t = end) {
    // Takes rows that follow each other in memory.
    end = t + 1;
    while (end < group.count &&
           group.offsets[end] == group.offsets[end - 1] + stride) {
      ++end;
    }
    for (int64_t i = t; i < Smaller(end, next.count); ++i) {
      FetchRow(values + next.offsets[i], features);
    }
    RunPanelProduct(
        {.left_MK = weights + n * item.group_size * kAttentionChunk + t,
         .m_stride = kAttentionChunk,
         .right_KN = values + group.offsets[t],
         .right_stride = stride,
         .num_rows = item.group_size,
         .num_terms = end - t,
         .num_columns = features,
         .adds = group.begin + t > item.begin,
         .in_order = true,
         .out_MN = out_NGC + n * item.group_size * features,
         .out_stride = features});
  }
}

// Calls run(group, next) for all groups of the item's tokens.
template <typename Run>
WEFT_INLINE void ForGroups(const PagedAttentionItem& item, Run run) {
  TokenGroup group = GroupAt(item, item.begin);
  while (group.count > 0) {
    const TokenGroup next = GroupAt(item, group.end());
    run(group, next);
    group = next;
  }
}

// Computes an item with at most kMaxHeads query heads.
void AttendHeads(const PagedAttentionItem& item, float* out_NGC,
                 float* lse_NG) {
  const int64_t features = item.head_features;
  // Vectors of scores begin where those of a whole chunk do.
  const int64_t skipped = item.begin % kSoftmaxPadding;
  float scores[kMaxHeads * kAttentionChunk];
  const auto column = [&](const TokenGroup& group) {
    return scores + skipped + group.begin - item.begin;
  };
  ForGroups(item, [&](const TokenGroup& group, const TokenGroup& next) {
    for (int64_t n = 0; n < item.num_heads; ++n) {
      ScoreGroup(item, group, next, n, column(group));
    }
  });
  const SoftmaxKeys keys{.begin = skipped,
                         .end = skipped + item.end - item.begin,
                         .size = skipped + item.end - item.begin};
  const int64_t rows = item.num_heads * item.group_size;
  SoftmaxSum sums[kMaxHeads];
  for (int64_t row = 0; row < rows; ++row) {
    sums[row] = SoftmaxRow(keys, item.softcap, scores + row * kAttentionChunk);
  }
  ForGroups(item, [&](const TokenGroup& group, const TokenGroup& next) {
    for (int64_t n = 0; n < item.num_heads; ++n) {
      AddValues(item, group, next, n, column(group), out_NGC);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    const float factor = 1.0F / sums[row].sum;
    float* const out_C = out_NGC + row * features;
    for (int64_t c = 0; c < features; ++c) out_C[c] *= factor;
    lse_NG[row] = sums[row].max + __builtin_logf(sums[row].sum);
  }
}

// Cuts the item into pieces of at most kMaxHeads query heads. A piece has some
// key/value heads with all their query heads, or a part of the query heads of
// one key/value head.
void PagedAttention(const PagedAttentionItem& item, float* out_NGC,
                    float* lse_NG) {
  const int64_t features = item.head_features;
  const int64_t group = item.group_size;
  const int64_t queries = Smaller(group, kMaxHeads);
  const int64_t heads = kMaxHeads / queries;
  for (int64_t n = 0; n < item.num_heads;) {
    PagedAttentionItem piece = item;
    piece.k_pages += n * features;
    piece.v_pages += n * features;
    piece.num_heads = Smaller(heads, item.num_heads - n);
    for (int64_t g = 0; g < group; g += queries) {
      const int64_t row = n * group + g;
      piece.group_size = Smaller(queries, group - g);
      piece.q_NGC = item.q_NGC + row * features;
      AttendHeads(piece, out_NGC + row * features, lse_NG + row);
    }
    n += piece.num_heads;
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
