// The large matrix products of the base model.
#ifndef WEFT_SRC_OPS_MATMUL_H_
#define WEFT_SRC_OPS_MATMUL_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Whether products with the same weight have the same number of rows again and
// again, as those of a batch's tokens, or another one every time, as those of
// an expert's tokens.
enum class RowCount { kRecurs, kVaries };

// Returns a b. On a CPU, b may be bf16 with an f32 a, so that weights may be
// stored in bf16. The product is then computed in f32, or in bf16 with f32 sums
// where bf16_product.h says so. b may also be a weight of 8 bits
// (int8_weight.h) or its transposed view. It then counts as the numbers [O, I]
// or [I, O] that it stands for, and the product is that with these numbers in
// the dtype of a.
//
// If a has few rows, a kernel of kernels/cpu computes the product, and a row of
// the result has the same bits in every batch. Few are up to 32 rows, or up to
// 128 if b is a transposed view of a weight of bf16 or 8 bits. Such a view is
// read once for every 32 rows. Libraries choose their code by the number of
// rows, and on some processors its bits differ.
//
// With more rows, b is widened first, one part at a time. In f32 on an AMD
// processor, oneDNN computes the product, because MKL, LibTorch's default,
// takes an older code path there (Zen 4, two cores: 220 GFLOP/s against 190 at
// training sizes). oneDNN keeps compiled code for each shape, and
// server/main.cc bounds how much. If the number of rows varies, PanelMatMul
// computes the product in f32 on any processor. Products with a LoRA rank have
// many shapes, too, because tenants' lengths differ; src/lora has them.
// Shapes:  a_MK [M, K], whose rows may be rows of a larger matrix; b_KN [K, N],
//          also a transposed view; of the same dtype, except as above. Returns
//          [M, N] in the dtype of a.
// Errors:  throws c10::Error.
// Threads: any.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Returns a b + bias_N. An undefined bias adds nothing.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                                const at::Tensor& bias_N,
                                RowCount row_count = RowCount::kRecurs);

// Returns x W^T + bias_O, as MatMul does with the transposed weight.
// Shapes:  x_MI [M, I], weight_OI [O, I].
[[nodiscard]] at::Tensor Linear(const at::Tensor& x_MI,
                                const at::Tensor& weight_OI,
                                const at::Tensor& bias_O = {},
                                RowCount row_count = RowCount::kRecurs);

// Computes y = a b, where y [M, N] may consist of rows of a larger matrix.
void MatMulInto(const at::Tensor& a_MK, const at::Tensor& b_KN,
                at::Tensor y_MN);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_MATMUL_H_
