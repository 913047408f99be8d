// The product of f32 rows with a bf16 weight in the arithmetic of bf16: rows
// are rounded to bf16, and sums are f32.
//
// Legend: M rows, K inputs, N outputs.
#ifndef WEFT_SRC_OPS_BF16_PRODUCT_H_
#define WEFT_SRC_OPS_BF16_PRODUCT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "kernels/cpu/bf16_product.h"

namespace weft::ops {

// Returns whether the processor has instructions for such products.
[[nodiscard]] bool HasBf16Instructions();

// Returns the kernels. Errors: throws c10::Error if the processor lacks the
// instructions.
[[nodiscard]] const kernels::cpu::Bf16KernelTable& Bf16Table();

// Allows products in bf16 for MatMul with bf16 weights, for the adapters beside
// them (lora/lora_bf16.h), and for the gradients of attention over f32 rows, if
// the processor has the instructions. Without a call, products are f32. Returns
// whether they are in bf16 from now on.
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

// Returns the same of Linear, without a view of the weight, which would cost a
// decode step more than the question.
[[nodiscard]] bool IsBf16Linear(const at::Tensor& x_MI,
                                const at::Tensor& weight_OI);

// Returns rows of f32 rounded to bf16, as operands of Bf16Product: [M, K], with
// a zero after an odd K, so [M, K + K % 2].
[[nodiscard]] at::Tensor RoundToBf16(const at::Tensor& a_MK);

// Rows [row, row + num_rows) of y at outputs [output, output + num_outputs),
// which is at most one panel.
struct Bf16Block {
  int64_t row = 0;
  int64_t num_rows = 0;
  int64_t output = 0;
  int64_t num_outputs = 0;
};

// Returns the terms that the block's rows have beside those of the product, and
// reduces num_rows to the rows for which they are. They are valid until the
// next call.
using TermsOfBlock = std::function<kernels::cpu::Bf16Terms(Bf16Block&)>;
// Is called once by each thread that takes part in a product. The thread calls
// the result for the rows of one panel after another, in ascending order.
using MakeTermsOfBlock = std::function<TermsOfBlock()>;

// Computes y = a b. The bits of a row of y do not depend on other rows or on
// the number of threads. LibTorch reaches oneDNN's bf16 product with bf16
// results only, which costs a rounding of every sum and two more passes over y;
// this product is as fast and writes f32 (kernels/cpu/bf16_product.h).
// Shapes:  rounded as RoundToBf16 returns it; b_KN [K, N] bf16, also a
//          transposed view; y_MN [M, N] f32, whose rows may be rows of a larger
//          matrix.
// Errors:  throws c10::Error if the processor lacks the instructions.
// Threads: any.
void Bf16Product(const at::Tensor& rounded, const at::Tensor& b_KN,
                 const at::Tensor& y_MN,
                 const MakeTermsOfBlock& make_terms = {});

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_BF16_PRODUCT_H_
