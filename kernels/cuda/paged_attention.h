// Attention of one new token per sequence over its paged keys and values.
// Legend: B sequences, H query heads, K key/value heads, C head features, P
// pages, S tokens per page, L table entries per sequence.
#ifndef WEFT_KERNELS_CUDA_PAGED_ATTENTION_H_
#define WEFT_KERNELS_CUDA_PAGED_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

inline constexpr int64_t kMaxHeadFeatures = 256;
inline constexpr int kMaxSplits = 128;

// The rule that splits the visible tokens of a sequence into parts, which
// different blocks compute. A sequence gets one part per 128 tokens, but at
// most `wanted` parts. If these parts would have more than 2048 tokens, it gets
// one part per 2048 tokens. It never gets more than `most` parts.
struct AttentionSplits {
  int wanted = 1;
  int most = 1;  // At most kMaxSplits; the number of blocks in grid.y.
};

// All pointers are device pointers.
struct PagedAttentionBatch {
  DType dtype = DType::kF32;    // The dtype of q, pages and out.
  int64_t batch = 0;            // B.
  int64_t num_heads = 0;        // H, a multiple of K.
  int64_t num_kv_heads = 1;     // K.
  int64_t head_features = 0;    // C, at most kMaxHeadFeatures.
  int64_t page_tokens = 0;      // S.
  const void* q_BHC = nullptr;  // The heads of each sequence are contiguous.
  // The distance in elements from the q of one sequence to the q of the next.
  // Set it if rows also hold k and v. 0: all of q is contiguous.
  int64_t q_stride = 0;
  const void* k_pages_PSKC = nullptr;
  const void* v_pages_PSKC = nullptr;
  const int32_t* page_table_BL = nullptr;
  int64_t table_entries = 0;           // L.
  const int32_t* lengths_B = nullptr;  // Number of tokens of each sequence.
  int64_t window = 0;                  // Number of last tokens to see; 0: all.
  float scale = 1;
  float softcap = 0;  // If > 0, x becomes softcap * tanh(x / softcap).
  // One extra logit per head [H]. It counts in the denominator of the head's
  // softmax, but belongs to no token. Null: none.
  const float* sinks_H = nullptr;
  void* out_BHC = nullptr;  // Contiguous.
  AttentionSplits splits;
  float* workspace = nullptr;  // PagedAttentionWorkspace floats.
};

// Returns the splits that keep a device busy. Without splits, few sequences
// would leave multiprocessors idle, and a very long sequence would end long
// after the others. Only the device knows the lengths, so this function bounds
// them by the table's width and the window. Returns one split if there are more
// groups of heads than PagedAttention can split.
AttentionSplits ChooseAttentionSplits(const PagedAttentionBatch& batch);

int64_t PagedAttentionWorkspace(const PagedAttentionBatch& batch);

// Computes out[b] = softmax(softcap(scale * q[b] . k)) v over the first
// lengths[b] tokens of the sequence with pages page_table[b], or over the last
// `window` of them. A sink adds only to the denominator of the softmax. Writes
// zeros for a length of 0. Table entries and page slots of other tokens are not
// read. Keys and values are read once for up to 8 query heads that share them.
//
// The work is one launch, which a graph may replay with other lengths: its grid
// depends only on B, H, K and splits.most, and each block reads lengths[b].
// Splits of a sequence merge in order, so a sequence's bits depend only on its
// own tokens and on `splits`.
// Errors:  cudaErrorInvalidValue for C or splits.most out of range, or for
//          splits.most > 1 with more than 8192 groups of heads; and those of
//          the launch. A group is up to 8 query heads of a sequence that share
//          a key/value head.
// Threads: any; the work is queued on `stream`, and nothing waits for it. Two
//          launches with splits must not run on one device at the same time,
//          because they share the counters of finished splits.
// Source:  dense attention in f64; online softmax, Milakov and Gimelshein 2018;
//          splits, Dao et al., Flash-Decoding 2023.
[[nodiscard]] cudaError_t PagedAttention(const PagedAttentionBatch& batch,
                                         cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PAGED_ATTENTION_H_
