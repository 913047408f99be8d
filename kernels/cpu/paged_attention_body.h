// Implements paged_attention of kernels.h: the products of panel_product with
// keys and values where the pages have them, and softmax_row between the two.
// So the bits are those of the products of whole matrices. Compiled only in
// table_*.cc.
#ifndef WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_
#define WEFT_KERNELS_CPU_PAGED_ATTENTION_BODY_H_

#include "kernels/cpu/attention_rows_body.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/panel_product_body.h"
#include "kernels/cpu/quads.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// The most query heads that AttendHeads computes at a time.
constexpr int64_t kMaxHeads = 32;

// The keys or values of a few tokens, for one key/value head: row i begins at
// base + offsets[i].
struct HeadRows {
  const float* base = nullptr;
  const int64_t* offsets = nullptr;
  int64_t count = 0;  // At most kPanelColumns.
};

// Prefetches features [begin, end) of the rows [first, first + count). The
// model's weights have evicted the rows since the last decode step, and the
// hardware does not prefetch them, because the rows of a head are not adjacent.
// Callers spread the prefetches over their work, because a core keeps only so
// many lines in flight.
WEFT_INLINE void FetchRows(const HeadRows& rows, int64_t first, int64_t count,
                           int64_t begin, int64_t end) {
  const int64_t last = Smaller(first + count, rows.count);
  for (int64_t i = first; i < last; ++i) {
    const float* const row = rows.base + rows.offsets[i];
    for (int64_t c = begin; c < end; c += kLinePart) {
      __builtin_prefetch(row + c);
    }
  }
}

// Writes the offset of each token's row from the first row of the pages.
WEFT_INLINE void FindRows(const PagedAttentionItem& item, int64_t* offsets) {
  const int64_t stride = item.num_kv_heads * item.head_features;
  int64_t page = item.begin / item.page_tokens;
  int64_t row = item.begin % item.page_tokens;
  for (int64_t i = 0; i < item.end - item.begin; ++i) {
    offsets[i] = (item.page_table[page] * item.page_tokens + row) * stride;
    if (++row == item.page_tokens) {
      row = 0;
      ++page;
    }
  }
}

// Copies features [begin, begin + count) of keys to a panel. Columns after the
// last key get some key. Meanwhile prefetches the rows `next`.
WEFT_INLINE void CopyKeys(const HeadRows& keys, const HeadRows& next,
                          int64_t begin, int64_t count, float* panel) {
  const int64_t width = RoundUp(keys.count);
  // So many whole rows are prefetched at a time.
  const int64_t rows = kWidth * kLinePart / count + 1;
  for (int64_t t = 0; t < width; t += kWidth) {
    const float* row[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) {
      row[i] = keys.base + keys.offsets[Smaller(t + i, keys.count - 1)] + begin;
    }
    int64_t fetched = 0;
    for (int64_t c = 0; c < count; c += kLinePart) {
      const int64_t more = Smaller(rows, kWidth - fetched);
      FetchRows(next, t + fetched, more, begin, begin + count);
      fetched += more;
      StoreTransposed(row, Smaller(kLinePart, count - c), width,
                      panel + c * width + t);
      for (const float*& from : row) from += kLinePart;
    }
  }
}

// Writes the scaled scores of keys for the G queries of their head to scores
// [G, kAttentionChunk].
WEFT_INLINE void ScoreKeys(const PagedAttentionItem& item, const float* q_GC,
                           const HeadRows& keys, const HeadRows& next,
                           float* scores) {
  float panel[kPartTerms * kPanelColumns];
  for (int64_t c = 0; c < item.head_features; c += kPartTerms) {
    const int64_t terms = Smaller(kPartTerms, item.head_features - c);
    CopyKeys(keys, next, c, terms, panel);
    RunPanelProduct({.left_MK = q_GC + c,
                     .m_stride = item.head_features,
                     .right_KN = panel,
                     .num_rows = item.group_size,
                     .num_terms = terms,
                     .num_columns = keys.count,
                     .scale = item.scale,
                     .adds = c > 0,
                     .out_MN = scores,
                     .out_stride = kAttentionChunk});
  }
}

// Adds values, times the weights [G, kAttentionChunk] of their tokens, to out
// [G, C], or overwrites it unless `adds`.
WEFT_INLINE void AddValues(const PagedAttentionItem& item, const float* weights,
                           const HeadRows& values, const HeadRows& next,
                           bool adds, float* out_GC) {
  const int64_t stride = item.num_kv_heads * item.head_features;
  int64_t end = 0;
  for (int64_t t = 0; t < values.count; t = end) {
    // Takes rows that follow each other in memory.
    end = t + 1;
    while (end < values.count &&
           values.offsets[end] == values.offsets[end - 1] + stride) {
      ++end;
    }
    FetchRows(next, t, end - t, 0, item.head_features);
    RunPanelProduct({.left_MK = weights + t,
                     .m_stride = kAttentionChunk,
                     .right_KN = values.base + values.offsets[t],
                     .right_stride = stride,
                     .num_rows = item.group_size,
                     .num_terms = end - t,
                     .num_columns = item.head_features,
                     .adds = adds || t > 0,
                     .in_order = true,
                     .out_MN = out_GC,
                     .out_stride = item.head_features});
  }
}

// Calls run(first token, head, rows, rows that come next) for all tokens and
// heads of pages that begin at `base`. `after` comes after the last.
template <typename Run>
WEFT_INLINE void ForRows(const PagedAttentionItem& item, const float* base,
                         const int64_t* offsets, const HeadRows& after,
                         Run run) {
  const int64_t count = item.end - item.begin;
  const auto rows_of = [&](int64_t token, int64_t n) {
    return HeadRows{.base = base + n * item.head_features,
                    .offsets = offsets + token,
                    .count = Smaller(kPanelColumns, count - token)};
  };
  for (int64_t token = 0; token < count; token += kPanelColumns) {
    for (int64_t n = 0; n < item.num_heads; ++n) {
      const bool is_last = n + 1 == item.num_heads;
      const HeadRows next = !is_last ? rows_of(token, n + 1)
                            : token + kPanelColumns < count
                                ? rows_of(token + kPanelColumns, 0)
                                : after;
      run(token, n, rows_of(token, n), next);
    }
  }
}

// Computes an item with at most kMaxHeads query heads.
void AttendHeads(const PagedAttentionItem& item, float* out_NGC,
                 float* lse_NG) {
  const int64_t count = item.end - item.begin;
  const int64_t features = item.head_features, group = item.group_size;
  int64_t offsets[kAttentionChunk];
  FindRows(item, offsets);
  // Vectors of scores begin where those of a whole chunk do.
  const int64_t skipped = item.begin % kSoftmaxPadding;
  float scores[kMaxHeads * kAttentionChunk];
  const auto scores_of = [&](int64_t token, int64_t n) {
    return scores + n * group * kAttentionChunk + skipped + token;
  };
  const HeadRows first_values = {.base = item.v_pages,
                                 .offsets = offsets,
                                 .count = Smaller(kPanelColumns, count)};
  HeadRows first_keys = first_values;
  first_keys.base = item.k_pages;
  FetchRows(first_keys, 0, first_keys.count, 0, features);
  ForRows(item, item.k_pages, offsets, first_values,
          [&](int64_t token, int64_t n, const HeadRows& keys,
              const HeadRows& next) {
            ScoreKeys(item, item.q_NGC + n * group * features, keys, next,
                      scores_of(token, n));
          });
  const SoftmaxKeys keys{
      .begin = skipped, .end = skipped + count, .size = skipped + count};
  SoftmaxSum sums[kMaxHeads];
  for (int64_t row = 0; row < item.num_heads * group; ++row) {
    sums[row] = SoftmaxRow(keys, item.softcap, scores + row * kAttentionChunk);
  }
  ForRows(item, item.v_pages, offsets, /*after=*/{},
          [&](int64_t token, int64_t n, const HeadRows& values,
              const HeadRows& next) {
            AddValues(item, scores_of(token, n), values, next,
                      /*adds=*/token > 0, out_NGC + n * group * features);
          });
  for (int64_t row = 0; row < item.num_heads * group; ++row) {
    float* const out_C = out_NGC + row * features;
    for (int64_t c = 0; c < features; ++c) out_C[c] *= sums[row].factor;
    lse_NG[row] = sums[row].lse;
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
