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

// Returns whether the processor and the build have instructions for products in
// bf16.
[[nodiscard]] bool HasBf16Instructions();

// Returns the kernels. Errors: throws c10::Error unless HasBf16Instructions().
[[nodiscard]] const kernels::cpu::Bf16KernelTable& Bf16Table();

// Allows or forbids products in bf16: MatMul of f32 rows with bf16 weights, the
// adapters of these weights (lora/lora_bf16.h), and gradients of attention over
// f32 rows. Before the first call, these products are forbidden. Returns
// whether they are allowed from now on, which also needs HasBf16Instructions().
// Threads: called before products run.
bool AllowBf16Products(bool allowed);

// Returns what AllowBf16Products returned last, or false before its first call.
[[nodiscard]] bool AreBf16ProductsAllowed();

// Returns whether MatMul computes the product of these operands in bf16: such
// products are allowed, a is f32 on a CPU, and b is bf16. If b is a transposed
// view, as in a forward pass, a must have more than 32 rows. Fewer rows take
// the skinny product, which reads b once and is f32. If b is stored row by row,
// as in a backward pass, a may have any number of rows.
[[nodiscard]] bool IsBf16Product(const at::Tensor& a_MK,
                                 const at::Tensor& b_KN);

// Returns whether Linear computes the product of these operands in bf16. Takes
// the weight itself, because making its transposed view would take longer than
// this check.
[[nodiscard]] bool IsBf16Linear(const at::Tensor& x_MI,
                                const at::Tensor& weight_OI);

// Returns f32 rows [M, K] rounded to bf16 for Bf16Product: [M, K + K % 2], with
// a zero at the end of each row if K is odd.
[[nodiscard]] at::Tensor RoundToBf16(const at::Tensor& a_MK);

// Rows [row, row + num_rows) of y at outputs [output, output + num_outputs).
// The outputs are those of one panel.
struct Bf16Block {
  int64_t row = 0;
  int64_t num_rows = 0;
  int64_t output = 0;
  int64_t num_outputs = 0;
};

// Returns terms to add to the block, such as those of an adapter. If only the
// first rows of the block have these terms, reduces the block's num_rows to the
// number of these rows. The terms are valid until the next call.
using TermsOfBlock = std::function<kernels::cpu::Bf16Terms(Bf16Block&)>;
// Makes the TermsOfBlock of one thread. Each thread that takes part in a
// product calls MakeTermsOfBlock once. The thread then calls the TermsOfBlock
// for one panel after another, and for the rows of a panel in ascending order.
using MakeTermsOfBlock = std::function<TermsOfBlock()>;

// Computes y = a b, where `rounded` is RoundToBf16(a), and adds the terms of
// make_terms if given. The bits of a row of y do not depend on other rows or on
// the number of threads. Through LibTorch, oneDNN's bf16 product writes bf16
// only, which rounds every sum and costs two more passes over y. Bf16Product is
// as fast and writes f32.
// Shapes:  b_KN [K, N] bf16, also a transposed view; y_MN [M, N] f32, whose
//          rows may be rows of a larger matrix.
// Errors:  throws c10::Error if the processor lacks the instructions, or if
//          the width of `rounded` does not fit K.
// Threads: any.
void Bf16Product(const at::Tensor& rounded, const at::Tensor& b_KN,
                 const at::Tensor& y_MN,
                 const MakeTermsOfBlock& make_terms = {});

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_BF16_PRODUCT_H_
