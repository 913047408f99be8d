// The product of the two halves of a fused gate-and-up projection:
// out = activation(gate) * up. kClampedSilu also changes `up` (activation.h).
// Legend: T packed tokens, F feed-forward features.
#ifndef WEFT_SRC_OPS_GATED_PRODUCT_H_
#define WEFT_SRC_OPS_GATED_PRODUCT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/ops/activation.h"

namespace weft::ops {

// Returns the product [T, F], in the dtype of gate_up_T2F.
// Shapes:  gate_up_T2F [T, 2F] contiguous, gate in columns [0, F).
// Errors:  throws c10::Error, which names the argument.
// Threads: any for CPU tensors, else the engine thread.
// Source:  Shazeer 2020 (SwiGLU, GEGLU).
at::Tensor GatedProduct(Activation activation, const at::Tensor& gate_up_T2F);

// Overwrites gate_up_T2F by its gradient: dgate in columns [0, F), then dup.
// dout_TF is the gradient of the product, contiguous.
void GatedProductBackward(Activation activation, const at::Tensor& dout_TF,
                          at::Tensor& gate_up_T2F);

// A kernel that computes one row of GatedProduct: out [F] from gate [F] and up
// [F].
using GatedRow = void (*)(const float* gate, const float* up, int64_t features,
                          float* out);
GatedRow GatedRowOf(Activation activation);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_GATED_PRODUCT_H_
