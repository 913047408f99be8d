// The large matrix products of the base model.
#ifndef WEFT_SRC_OPS_MATMUL_H_
#define WEFT_SRC_OPS_MATMUL_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// How the number of rows changes between products with the same weight.
// kRecurs: the same numbers come again, such as the token counts of batches.
// kVaries: most products have a new number, such as the token count of an
// expert.
enum class RowCount { kRecurs, kVaries };

// Returns a b. On a CPU, b may be bf16 while a is f32, so that weights may be
// stored in bf16. MatMul computes this product in f32, or in bf16 with f32 sums
// if IsBf16Product(a, b). b may also be a weight of 8 bits (int8_weight.h) or
// its transposed view. In that case MatMul multiplies with the weight's numbers
// in the dtype of a, so bf16 rounds them. There is one exception: on CUDA, if a
// has up to 64 rows of bf16 and b is a transposed view of 8 bits, Int8FewRows
// multiplies with the exact numbers. Then the bits of a row of the result do
// not depend on the other rows of a.
//
// If the product is not in bf16, and a is contiguous, f32, on a CPU and has few
// rows, a kernel of kernels/cpu computes the product. Then a row of the result
// has the same bits for any such number of rows. Libraries choose their code by
// the number of rows, and on some processors this choice changes the bits. Few
// means up to 32 rows, or up to 128 if b is a transposed view of a weight of
// bf16 or 8 bits. Such a view is read once for every 32 rows.
//
// With more rows, and if the product is not in bf16, MatMul first widens a bf16
// or 8-bit b, one part at a time. In f32 on an AMD processor, oneDNN then
// computes the product if LibTorch has it, because MKL, LibTorch's default,
// takes an older code path on AMD. On Zen 4 with two cores and the sizes of
// training, oneDNN reaches 220 GFLOP/s and MKL 190. oneDNN keeps compiled code
// for each shape, and server/main.cc bounds the number of shapes. With kVaries,
// PanelMatMul computes f32 products on any CPU instead.
// Shapes:  a_MK [M, K], whose rows may be rows of a larger matrix; b_KN [K, N],
//          also a transposed view; of the same dtype, except as above. Returns
//          [M, N] in the dtype of a.
// Errors:  throws c10::Error.
// Threads: any.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Returns a b + bias_N, for operands as above. An undefined bias adds nothing.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                                const at::Tensor& bias_N,
                                RowCount row_count = RowCount::kRecurs);

// Returns x W^T + bias_O, the same as MatMul with the transposed weight.
// Shapes:  x_MI [M, I], weight_OI [O, I].
[[nodiscard]] at::Tensor Linear(const at::Tensor& x_MI,
                                const at::Tensor& weight_OI,
                                const at::Tensor& bias_O = {},
                                RowCount row_count = RowCount::kRecurs);

// Computes y = MatMul(a, b), where y [M, N] may be rows of a larger matrix.
void MatMulInto(const at::Tensor& a_MK, const at::Tensor& b_KN,
                at::Tensor y_MN);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_MATMUL_H_
