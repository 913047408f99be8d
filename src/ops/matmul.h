// The large matrix products of the base model.
#ifndef WEFT_SRC_OPS_MATMUL_H_
#define WEFT_SRC_OPS_MATMUL_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Returns a b. On a CPU b may be bf16 beside a in f32: weights may be stored in
// bf16 while everything is computed in f32.
//
// Up to 32 rows of a with a weight (b a transposed view), 128 where it is bf16,
// take the kernel of kernels/cpu, which reads the stored weight once for 32
// rows. A row of the result then has the same bits in every batch. More rows
// widen b first, a part at a time. In f32 on an AMD processor they take
// oneDNN's product: LibTorch's own, MKL, takes an older code path there (Zen 4,
// two cores: 220 GFLOP/s against 190 at training sizes). oneDNN keeps compiled
// code for each shape, within the bound that server/main.cc sets. Products with
// a LoRA rank have many shapes, because tenants' lengths differ, so they go to
// at::mm. Shapes: a_MK [M, K] contiguous; b_KN [K, N], also a transposed view;
// one
//          dtype but for the above. Returns [M, N] in the dtype of a.
// Errors:  throws c10::Error.
// Threads: any.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN);

// a b + bias_N, which may be undefined: none.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                                const at::Tensor& bias_N);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_MATMUL_H_
