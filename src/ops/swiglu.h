// SwiGLU of a fused gate-and-up projection: out = silu(gate) * up.
// Legend: T packed tokens, F feed-forward features.
#ifndef WEFT_SRC_OPS_SWIGLU_H_
#define WEFT_SRC_OPS_SWIGLU_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Shapes:  gate_up_T2F [T, 2F] contiguous, gate in columns [0, F);
//          out_TF [T, F] contiguous.
// Threads: engine thread only.   Source: Shazeer 2020.
void SwiGlu(const at::Tensor& gate_up_T2F, at::Tensor& out_TF);

// Turns gate_up into its gradient in place: afterwards it holds dgate | dup.
void SwiGluBackward(const at::Tensor& dout_TF, at::Tensor& gate_up_T2F);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_SWIGLU_H_
