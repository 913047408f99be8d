// The large matrix products of the base model, in f32 or in the arithmetic of
// bf16, in which rows are rounded to bf16 and sums are f32.
//
// Legend: M rows, K inputs, N outputs.
#ifndef WEFT_SRC_OPS_MATMUL_H_
#define WEFT_SRC_OPS_MATMUL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

#include "kernels/cpu/bf16_product.h"
#include "kernels/cpu/row_product.h"

namespace weft::ops {

// Returns a b. On a CPU, b may be bf16 while a is f32, so that weights may be
// stored in bf16. MatMul computes this product in f32, or in bf16 with f32 sums
// if IsBf16Product(a, b). b may also be a weight of 8 bits (int8_weight.h) or
// its transposed view. In that case MatMul multiplies with the weight's numbers
// in the dtype of a, so bf16 rounds them. There is one exception: on CUDA, if a
// has up to 64 rows of bf16 and b is a transposed view of 8 bits, Int8FewRows
// multiplies with the exact numbers. Then the bits of a row of the result do
// not depend on the other rows of a.
//
// On a CPU, the bits of a row of the result depend on this row of a and on b,
// and not on other rows, their number, or threads. The kernels read a weight as
// it is stored, in f32, bf16 or 8 bits:
//
//  product              kernel          reads
//  x W^T (forward)      row_product     rows of x and of W, along the sum
//  dy W (backward)      panel_product   copies of 96 columns of W
//  either, in bf16      multiply_panel  copies of W, and rounded rows
//  f64, and on CUDA     LibTorch        -
//
// No weight is packed at load: both directions read it as it is stored. Narrow
// weights are widened 16 rows or 96 columns at a time.
// Shapes:  a_MK [M, K], whose rows may be rows of a larger matrix; b_KN [K, N],
//          also a transposed view; of the same dtype, except as above. Returns
//          [M, N] in the dtype of a.
// Errors:  throws c10::Error.
// Threads: any.
at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                  const at::Tensor& bias_N = {});

// Returns x W^T + bias_O, the same as MatMul with the transposed weight.
// Shapes:  x_MI [M, I], weight_OI [O, I].
at::Tensor Linear(const at::Tensor& x_MI, const at::Tensor& weight_OI,
                  const at::Tensor& bias_O = {});

// Computes y += scale a b, for operands of one floating-point dtype. In f32 on
// a CPU, each element adds its terms one after another to what is there, so its
// bits do not depend on how the terms are cut into calls.
// Shapes:  y_MN [M, N], a_MK [M, K], b_KN [K, N] of any strides.
// Errors:  throws c10::Error.
// Threads: any.
void AddMatMul(at::Tensor y_MN, const at::Tensor& a_MK, const at::Tensor& b_KN,
               double scale);

// Computes y = MatMul(a, b), where y [M, N] may be rows of a larger matrix.
void MatMulInto(const at::Tensor& a_MK, const at::Tensor& b_KN,
                at::Tensor y_MN);

// Returns whether the processor and the build have instructions for products in
// bf16.
bool HasBf16Instructions();

// Returns the kernels. Errors: throws c10::Error unless HasBf16Instructions().
const kernels::cpu::Bf16KernelTable& Bf16Table();

// Allows or forbids products in bf16: MatMul of f32 rows with bf16 weights, the
// adapters of these weights (lora/lora_bf16.h), and gradients of attention over
// f32 rows. Before the first call, these products are forbidden. Returns
// whether they are allowed from now on, which also needs HasBf16Instructions().
// Threads: called before products run.
bool AllowBf16Products(bool allowed);

// Returns what AllowBf16Products returned last, or false before its first call.
bool AreBf16ProductsAllowed();

// Returns whether MatMul computes the product of these operands, of which b may
// be transposed, in bf16: such products are allowed, a is f32 on a CPU, and b
// is bf16.
bool IsBf16Product(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Returns f32 rows [M, K] rounded to bf16 for Bf16Product: [M, K + K % 2], with
// a zero at the end of each row if K is odd.
at::Tensor RoundToBf16(const at::Tensor& a_MK);

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

// Computes `item` on raw memory, so that a caller can divide a product among
// threads without a tensor for each part. Output o of the item is the product
// with row first_row + o of `weight`.
// Shapes:  `weight` [O, I] of f32, bf16 or 8 bits, or its transposed view.
//          item.weight_stride is the distance between the weight's rows.
// Errors:  throws c10::Error if the weight is of another dtype.
// Threads: any. Concurrent calls write distinct outputs.
void RunRowProduct(const kernels::cpu::RowProduct& item,
                   const at::Tensor& weight, int64_t first_row);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_MATMUL_H_
