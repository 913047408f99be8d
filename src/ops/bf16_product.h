// The product of f32 rows with a bf16 weight in the arithmetic of bf16: rows
// are rounded to bf16, and sums are f32.
#ifndef WEFT_SRC_OPS_BF16_PRODUCT_H_
#define WEFT_SRC_OPS_BF16_PRODUCT_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Returns whether the processor has instructions for such products.
[[nodiscard]] bool HasBf16Instructions();

// Allows products in bf16 for MatMul with bf16 weights and for the gradients of
// attention over f32 rows, if the processor has the instructions. Without a
// call, products are f32. Returns whether they are in bf16 from now on.
// Threads: called before products run.
bool AllowBf16Products(bool allowed);

// Returns what AllowBf16Products returned last; false before.
[[nodiscard]] bool AreBf16ProductsAllowed();

// Returns whether MatMul computes the product of these operands in bf16. It
// does so for any number of rows of a backward pass, whose weight is stored row
// by row. In a forward pass few rows take the skinny product, which reads a
// weight once and is f32.
[[nodiscard]] bool IsBf16Product(const at::Tensor& a_MK,
                                 const at::Tensor& b_KN);

// Computes y = a b. The bits of a row of y do not depend on other rows or on
// the number of threads. LibTorch reaches oneDNN's bf16 product with bf16
// results only, which costs a rounding of every sum and two more passes over y;
// this product is as fast and writes f32 (kernels/cpu/bf16_product.h).
// Shapes:  a_MK [M, K] f32 and y_MN [M, N] f32, whose rows may be rows of
//          larger matrices; b_KN [K, N] bf16, also a transposed view.
// Errors:  throws c10::Error if the processor lacks the instructions.
// Threads: any.
void Bf16Product(const at::Tensor& a_MK, const at::Tensor& b_KN,
                 const at::Tensor& y_MN);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_BF16_PRODUCT_H_
