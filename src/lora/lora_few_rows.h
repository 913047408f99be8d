// The adapters' part of a linear layer if each adapter has few rows, as in
// decoding. It calls the kernels of kernels/cpu on raw pointers, because a
// tensor operation for every adapter and projection costs more than the
// products.
//
// Legend: as lora_linear.h. S: the floats of x A^T, [rows, R] of one segment
// after the other.
#ifndef WEFT_SRC_LORA_LORA_FEW_ROWS_H_
#define WEFT_SRC_LORA_LORA_FEW_ROWS_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"

namespace weft::lora {

// Returns whether the segment has at most 32 rows and all is f32 on the CPU.
[[nodiscard]] bool HasFewRows(const at::Tensor& x_TI,
                              const LoraSegment& segment);

// The functions below compute the segments that HasFewRows accepts.
// Threads: engine thread only.
// Source:  lora_linear.h; the tests compare both ways with the formula in f64.

// x A^T, [S]. Shapes: x_TI [T, I] contiguous.
[[nodiscard]] at::Tensor ShrinkFewRows(const at::Tensor& x_TI,
                                       const LoraRouting& routing,
                                       const LoraSite& site);

// y += scale_a (x A_a^T) B_a^T. Shapes: y_TO [T, O] contiguous.
void ExpandFewRows(const at::Tensor& shrunk_S, const LoraRouting& routing,
                   const LoraSite& site, const ModelShape& shape,
                   at::Tensor& y_TO);

// Returns views of it, one for each segment; undefined if the segment has no
// part. Shapes: x_TI as above.
[[nodiscard]] ShrunkInputs SplitShrunk(const at::Tensor& shrunk_S,
                                       const at::Tensor& x_TI,
                                       const LoraRouting& routing,
                                       const LoraSite& site);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_FEW_ROWS_H_
