// Parts of ops for callers that share few rows among threads themselves: they
// take raw memory, so that there is no tensor for each part.
#ifndef WEFT_SRC_OPS_FEW_ROWS_H_
#define WEFT_SRC_OPS_FEW_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/cpu/skinny_product.h"
#include "src/ops/activation.h"

namespace weft::ops {

// Runs the kernel of MatMul for few rows on the rows of a weight that begin at
// `first_row`. The item's outputs count from that row.
// Shapes:  `weight` [O, I] of f32, bf16 or 8 bits, or its transposed view. The
//          item has its stride.
// Errors:  throws c10::Error if the weight is of another dtype.
// Threads: any, for distinct outputs.
void RunSkinny(const kernels::cpu::SkinnyProduct& item,
               const at::Tensor& weight, int64_t first_row);

// Computes a row of GatedProduct: out [F] from gate [F] and up [F].
using GatedRow = void (*)(const float* gate, const float* up, int64_t features,
                          float* out);
[[nodiscard]] GatedRow GatedRowOf(Activation activation);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_FEW_ROWS_H_
