// Kernels of ops on raw memory. With them, a caller can divide a product of few
// rows among threads without a tensor for each thread's part.
#ifndef WEFT_SRC_OPS_FEW_ROWS_H_
#define WEFT_SRC_OPS_FEW_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "kernels/cpu/skinny_product.h"
#include "src/ops/activation.h"

namespace weft::ops {

// Computes `item`, a product of few rows. Output o of the item is the product
// with row first_row + o of `weight`.
// Shapes:  `weight` [O, I] of f32, bf16 or 8 bits, or its transposed view.
//          item.weight_stride is the distance between the weight's rows.
// Errors:  throws c10::Error if the weight is of another dtype.
// Threads: any. Concurrent calls write distinct outputs.
void RunSkinny(const kernels::cpu::SkinnyProduct& item,
               const at::Tensor& weight, int64_t first_row);

// A kernel that computes one row of GatedProduct: out [F] from gate [F] and up
// [F].
using GatedRow = void (*)(const float* gate, const float* up, int64_t features,
                          float* out);
[[nodiscard]] GatedRow GatedRowOf(Activation activation);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_FEW_ROWS_H_
