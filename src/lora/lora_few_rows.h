// The adapters' part of linear layers on a CPU for segments of few rows, as in
// decoding. The functions call the kernels of kernels/cpu on raw pointers,
// because a tensor operation for every adapter and projection would cost more
// than the products.
//
// Legend: as in lora_linear.h. S is the number of floats in x A^T of all
// segments of few rows. The matrices [rows, R] of these segments are stored one
// after another.
#ifndef WEFT_SRC_LORA_LORA_FEW_ROWS_H_
#define WEFT_SRC_LORA_LORA_FEW_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/lora/lora_cpu_rows.h"
#include "src/lora/lora_linear.h"

namespace weft::lora {

// Returns whether the segment has at most 32 rows.
[[nodiscard]] bool HasFewRows(const LoraSegment& segment);

// The functions below compute the segments for which HasFewRows is true.
// Threads: any, for distinct outputs.
// Source:  the formula of lora_linear.h.

// Returns S, the number of floats in x A^T.
[[nodiscard]] int64_t NumShrunk(const LoraRouting& routing,
                                const LoraSite& site);

// Computes x A^T [S]. Shapes: x_TI [T, I] contiguous.
void ShrinkFewRows(const float* x_TI, const LoraRouting& routing,
                   const LoraSite& site, float* shrunk_S);

// Computes y += scale_a (x A_a^T) B_a^T. Shapes: y_TO [T, O].
void ExpandFewRows(const float* shrunk_S, const LoraRouting& routing,
                   const LoraSite& site, const ModelShape& shape,
                   const cpu::Rows& y_TO);

// Calls ShrinkFewRows and then ExpandFewRows. Does not keep x A^T.
void AddFewRows(const float* x_TI, const LoraRouting& routing,
                const LoraSite& site, const ModelShape& shape,
                const cpu::Rows& y_TO);

// Returns a view of `shrunk_S` for each segment. The view is undefined if the
// segment has more than 32 rows or its adapter does not adapt the site.
[[nodiscard]] ShrunkInputs SplitShrunk(const at::Tensor& shrunk_S,
                                       const LoraRouting& routing,
                                       const LoraSite& site);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_FEW_ROWS_H_
