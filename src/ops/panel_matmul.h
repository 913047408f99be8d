// The product of f32 matrices on a CPU by kernels that take any shape.
#ifndef WEFT_SRC_OPS_PANEL_MATMUL_H_
#define WEFT_SRC_OPS_PANEL_MATMUL_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Returns whether PanelMatMul takes the operands: they are f32 on a CPU and not
// empty.
[[nodiscard]] bool TakesPanels(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Returns a b + bias_N. An undefined bias adds nothing. Copies b to panels, a
// few columns at a time. On one core it is about as fast as MKL and a twentieth
// slower than oneDNN, which compiles code for every shape first (Zen 4, from
// 128 rows on). The bits of a row do not depend on other rows or on the number
// of threads.
// Shapes:  a_MK [M, K], whose rows may be rows of a larger matrix; b_KN [K, N],
//          also a transposed view. Returns [M, N].
// Errors:  throws c10::Error.
// Threads: any.
[[nodiscard]] at::Tensor PanelMatMul(const at::Tensor& a_MK,
                                     const at::Tensor& b_KN,
                                     const at::Tensor& bias_N);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_PANEL_MATMUL_H_
