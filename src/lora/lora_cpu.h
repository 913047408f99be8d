// The adapters' part of linear layers in f32 on a CPU. A parallel loop goes
// over many segments of a batch, so that threads do not wait for each other
// after every segment.
//
// Legend: as in lora_linear.h. n counts the rows of a segment.
#ifndef WEFT_SRC_LORA_LORA_CPU_H_
#define WEFT_SRC_LORA_LORA_CPU_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"

namespace weft::lora::cpu {

// Shapes:  x_TI [T, I] contiguous; y_TO and dy_TO [T, O] and dx_TI [T, I] with
// unit stride in the last dimension.
// Errors:  throw c10::Error.
// Threads: any, for distinct outputs.
// Source:  the path by at::mm in lora_linear.cc.

// Computes y += scale_a (x A_a^T) B_a^T, and returns x A^T (ShrunkInputs). If
// y_TO is undefined, computes only x A^T. The bits of a row depend only on the
// row, its adapter, and whether its segment has more than 32 rows.
ShrunkInputs Forward(const at::Tensor& x_TI, const LoraPass& pass,
                     const LoraSite& site, const at::Tensor& y_TO);

// Like Forward, but only for segments of at most 32 rows. For each other
// segment, leaves y unchanged and returns an undefined tensor.
ShrunkInputs ForwardFewRows(const at::Tensor& x_TI, const LoraPass& pass,
                            const LoraSite& site, const at::Tensor& y_TO);

// Adds dLoss/dA and dLoss/dB to the gradients. If dx_TI is defined, adds the
// adapters' part of dLoss/dx to it. The bits of a gradient depend only on the
// segments of its adapter.
void Backward(const at::Tensor& dy_TO, const at::Tensor& x_TI,
              const LoraPass& pass, const LoraSite& site,
              const ShrunkInputs& shrunk, const LoraGradients& gradients,
              const at::Tensor& dx_TI);

// Adds dLoss/dA and dLoss/dB to the gradients. Returns ds = scale_a dy B_a [T,
// Rmax], where Rmax is the largest R of a segment. The rows of a segment use
// the first R columns; all other elements are zero.
[[nodiscard]] at::Tensor AddGradients(const at::Tensor& dy_TO,
                                      const at::Tensor& x_TI,
                                      const LoraPass& pass,
                                      const LoraSite& site,
                                      const ShrunkInputs& shrunk,
                                      const LoraGradients& gradients);

}  // namespace weft::lora::cpu

#endif  // WEFT_SRC_LORA_LORA_CPU_H_
