// The product of f32 matrices of any shape by the panel kernels of kernels/cpu.
#ifndef WEFT_SRC_OPS_PANEL_MATMUL_H_
#define WEFT_SRC_OPS_PANEL_MATMUL_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Returns whether PanelMatMul takes the operands: they are f32 on a CPU and not
// empty.
[[nodiscard]] bool TakesPanels(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Returns a b + bias_N. An undefined bias adds nothing. Copies b to panels
// (kernels/cpu/panel_product.h), a few columns at a time. On one core this is
// about as fast as MKL, and 5 % slower than oneDNN, which first compiles code
// for each shape (Zen 4, from 128 rows on). The bits of a row do not depend on
// other rows or on the number of threads.
// REQUIRES: TakesPanels(a_MK, b_KN).
// Shapes:  a_MK [M, K], whose rows may be rows of a larger matrix; b_KN [K, N],
//          also a transposed view. Returns [M, N].
// Errors:  throws c10::Error.
// Threads: any.
[[nodiscard]] at::Tensor PanelMatMul(const at::Tensor& a_MK,
                                     const at::Tensor& b_KN,
                                     const at::Tensor& bias_N);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_PANEL_MATMUL_H_
