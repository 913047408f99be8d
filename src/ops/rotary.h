// Rotary position embedding, Hugging Face's half-split form: feature c of a
// head is paired with c + C/2.
// Legend: T packed tokens, M heads, C head features, P positions.
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

// Rotates x in place; `inverse` rotates back, which is the backward pass.
// Shapes:  x_TMC [T, M, C], unit stride in C, any stride in T and M;
//          positions_T [T] i32 on x's device, each < P.
// Threads: engine thread only.
void ApplyRotary(at::Tensor& x_TMC, const at::Tensor& positions_T,
                 const RotaryTable& table, bool inverse);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_ROTARY_H_
