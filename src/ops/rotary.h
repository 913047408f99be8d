// Prepares a layer's heads for attention: norms them if the model has head
// norms, applies rotary position embedding, and writes keys and values to the
// cache. Rotary is Hugging Face's half-split form: feature c of a head is
// paired with c + C/2.
// Legend: T packed tokens, M heads, Q query heads, K key heads, C head
// features, P positions.
#ifndef WEFT_SRC_OPS_ROTARY_H_
#define WEFT_SRC_OPS_ROTARY_H_

#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::ops {

// cos_PC, sin_PC [P, C/2] f32 for positions 0..P-1.
struct RotaryTable {
  at::Tensor cos_PC;
  at::Tensor sin_PC;
};

// Table of angles position * inverse_frequency[c].
// Shapes: inverse_frequencies [C/2] (scaling such as llama3's is already in).
[[nodiscard]] RotaryTable MakeRotaryTable(
    const std::vector<double>& inverse_frequencies, int64_t num_positions,
    at::Device device);

// The heads of a projection, views of it. Unit stride in C, any stride in T and
// M.
struct Heads {
  at::Tensor q_TQC;
  at::Tensor k_TKC;
  at::Tensor v_TKC;  // May be undefined where it is not read.
};

// RmsNorm of every head before the rotation. Undefined weights: none.
struct HeadNorms {
  at::Tensor q_C;
  at::Tensor k_C;
  double eps = 0;
};

// The rows of the pages to which keys and values go: token t goes to
// slots_T[t]. Slots below 0 are not written. Undefined slots: no token is
// written.
struct KvSlots {
  at::Tensor slots_T;       // [T] i64, distinct where they are not below 0.
  at::Tensor k_pages_PSKC;  // Contiguous, S tokens per page.
  at::Tensor v_pages_PSKC;
};

// Norms the heads and rotates them, in place, then writes k and v to the pages:
// one launch on CUDA.
// Shapes:  positions_T [T] i32 on the heads' device, each below the table's
//          positions.
// Errors:  throws c10::Error.
// Threads: engine thread only.
void PrepareHeads(const Heads& heads, const at::Tensor& positions_T,
                  const RotaryTable& table, const HeadNorms& norms,
                  const KvSlots& slots);

// Writes to `into` the gradient of the heads before PrepareHeads, given that of
// the prepared heads: one launch on CUDA. `gradients` may be `into`. `raw` are
// the heads before, without v; they are read only when there are norms.
void PrepareHeadsBackward(const Heads& gradients, const at::Tensor& positions_T,
                          const RotaryTable& table, const HeadNorms& norms,
                          const Heads& raw, const Heads& into);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_ROTARY_H_
