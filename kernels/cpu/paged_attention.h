// Arguments of the paged attention kernel; see kernels.h.
#ifndef WEFT_KERNELS_CPU_PAGED_ATTENTION_H_
#define WEFT_KERNELS_CPU_PAGED_ATTENTION_H_

#include <cstdint>

namespace weft::kernels::cpu {

// Attention cuts the keys of a sequence at multiples of this number, and merges
// the results of the chunks in order. Every path on a CPU does so in f32. So a
// query has the same bits in training, in a prefix tree, in a piece of a prompt
// and in a decode step.
inline constexpr int64_t kAttentionChunk = 256;

// Attention of one token over tokens [begin, end) of its sequence, for N
// adjacent key/value heads. G query heads share each key/value head.
//
// Legend: K key/value heads, C head features, P pages, S tokens per page.
struct PagedAttentionItem {
  const float* q_NGC = nullptr;  // [N, G, C] contiguous.
  // Pages [P, S, K, C], already offset to the first of the N heads.
  const float* k_pages = nullptr;
  const float* v_pages = nullptr;
  const int32_t* page_table = nullptr;  // The sequence's page numbers in order.
  int64_t begin = 0;
  int64_t end = 0;            // > begin, in the same chunk.
  int64_t num_heads = 1;      // N.
  int64_t group_size = 1;     // G.
  int64_t num_kv_heads = 1;   // K.
  int64_t head_features = 0;  // C.
  int64_t page_tokens = 0;    // S.
  float scale = 1;
  float softcap = 0;  // If > 0, a score x becomes softcap * tanh(x / softcap).
};

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_PAGED_ATTENTION_H_
