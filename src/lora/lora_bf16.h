// Linear layers with adapters in bf16 arithmetic (ops/matmul.h). Forward
// rounds x once for both the base product and the adapters' products. A kernel
// adds the adapters' terms while the sums of y or dx are in registers. These
// operands are rounded to bf16: x, dy, A, ds, and in the forward pass also B
// and (scale x A^T). Sums are f32. These products are in f32: ds = scale dy B,
// the gradients of A and B, and the forward products of adapters for segments
// of at most 32 rows (lora_cpu.h).
//
// Legend: as in lora_linear.h.
#ifndef WEFT_SRC_LORA_LORA_BF16_H_
#define WEFT_SRC_LORA_LORA_BF16_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"

namespace weft::lora::bf16 {

// The functions below compute the formulas of lora_linear.h.
// REQUIRES: the base's product is in bf16 (ops::IsBf16Product).
// Errors:  throw c10::Error.
// Threads: any, for distinct outputs.
// Source:  the formulas in f64 on rounded operands.

// Returns y [T, O], and sets `shrunk`. The bits of a row depend only on the row
// and its adapter.
at::Tensor Forward(const at::Tensor& x_TI, const BaseLinear& base,
                   const LoraPass& pass, const LoraSite& site,
                   ShrunkInputs& shrunk);

// Returns the `shrunk` of Forward without computing y.
ShrunkInputs Shrink(const at::Tensor& x_TI, const LoraPass& pass,
                    const LoraSite& site);

// Adds dLoss/dA and dLoss/dB to the gradients. Returns dLoss/dx [T, I], or an
// undefined tensor if `want_input_gradient` is false.
at::Tensor Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
                    const BaseLinear& base, const LoraPass& pass,
                    const LoraSite& site, const ShrunkInputs& shrunk,
                    const LoraGradients& gradients, bool want_input_gradient);

}  // namespace weft::lora::bf16

#endif  // WEFT_SRC_LORA_LORA_BF16_H_
