// The adapters' part of a linear layer when each adapter has few rows, as in
// decoding: the kernels of kernels/cpu on raw pointers. A tensor operation for
// every adapter and projection costs more than the products themselves.
#ifndef WEFT_SRC_LORA_LORA_FEW_ROWS_H_
#define WEFT_SRC_LORA_LORA_FEW_ROWS_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"

namespace weft::lora {

// True when every segment has at most 32 rows, all in f32 on the CPU.
[[nodiscard]] bool HaveFewRows(const at::Tensor& x_TI,
                               const LoraRouting& routing);

// y += scale_a (x A_a^T) B_a^T for the rows of every segment, which
// HaveFewRows. Shapes:  x_TI [T, I], y_TO [T, O], both contiguous. Threads:
// engine thread only. Source:  LoraLinear; the tests compare both with the
// formula in f64.
void AddLoraFewRows(const at::Tensor& x_TI, const LoraRouting& routing,
                    const LoraSite& site, const ModelShape& shape,
                    at::Tensor& y_TO);

}  // namespace weft::lora

#endif  // WEFT_SRC_LORA_LORA_FEW_ROWS_H_
