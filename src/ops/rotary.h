// Prepares a layer's heads for attention: norms them if the model has head
// norms, applies rotary position embedding, and writes keys and values to the
// cache. Rotary embedding has Hugging Face's half-split form, which pairs
// feature c of a head with c + C/2.
//
// Legend: T packed tokens, M heads, Q query heads, K key heads, C head
// features, P positions (of a table) or pages, S tokens per page.
#ifndef WEFT_SRC_OPS_ROTARY_H_
#define WEFT_SRC_OPS_ROTARY_H_

#include <ATen/core/Tensor.h>

#include <vector>

namespace weft::ops {

// cos_PC and sin_PC are [P, C/2] f32 for positions 0..P-1.
struct RotaryTable {
  at::Tensor cos_PC;
  at::Tensor sin_PC;
};

// Returns the table of the angles position * inverse_frequencies[c]. Features
// that rotate are also multiplied by `magnitude`; those of frequency 0 are not.
// Shapes: inverse_frequencies [C/2], with any scaling (such as llama3's)
// applied.
RotaryTable MakeRotaryTable(const std::vector<double>& inverse_frequencies,
                            int64_t num_positions, at::Device device,
                            double magnitude = 1);

// Views of the heads of q, k and v, with unit stride in C and any strides in T
// and M.
struct Heads {
  at::Tensor q_TQC;
  at::Tensor k_TKC;
  at::Tensor v_TKC;  // May be undefined where v is not used.
};

// Weights of the RmsNorm of each head before the rotation. Undefined weights
// mean no norm.
struct HeadNorms {
  at::Tensor q_C;
  at::Tensor k_C;
  double eps = 0;
};

// Where keys and values are cached: token t goes to slot s = slots_T[t], which
// is row s % S of page s / S. A token with a negative slot is not written. If
// slots_T is undefined, no token is written.
struct KvSlots {
  at::Tensor slots_T;       // [T] i64. Slots >= 0 are distinct.
  at::Tensor k_pages_PSKC;  // Contiguous.
  at::Tensor v_pages_PSKC;
};

// Norms and rotates the heads of q and k in place, then writes k and v to the
// pages. On CUDA, f32 and bf16 heads take one kernel launch.
// Shapes:  positions_T [T] i32 on the heads' device, each less than P.
// Errors:  throws c10::Error.
// Threads: engine thread only.
void PrepareHeads(const Heads& heads, const at::Tensor& positions_T,
                  const RotaryTable& table, const HeadNorms& norms,
                  const KvSlots& slots);

// Takes `gradients`, the gradients of the heads after PrepareHeads, and writes
// the gradients of the heads before PrepareHeads to `into`, which may be
// `gradients`. `raw` holds q and k before PrepareHeads, and is read only if
// there are norms. On CUDA, f32 and bf16 heads take one kernel launch.
void PrepareHeadsBackward(const Heads& gradients, const at::Tensor& positions_T,
                          const RotaryTable& table, const HeadNorms& norms,
                          const Heads& raw, const Heads& into);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_ROTARY_H_
