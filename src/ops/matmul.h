// The large matrix products of the base model.
#ifndef WEFT_SRC_OPS_MATMUL_H_
#define WEFT_SRC_OPS_MATMUL_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Returns a b. On a CPU, b may be bf16 with an f32 a, so that weights may be
// stored in bf16 while everything is computed in f32.
//
// If a has few rows, a kernel of kernels/cpu computes the product, and a row of
// the result has the same bits in every batch. Few are up to 32 rows, or up to
// 128 if b is a transposed view of a bf16 weight. Such a view is read once for
// every 32 rows. Libraries choose their code by the number of rows, and on some
// processors its bits differ.
//
// With more rows, b is widened first, one part at a time. In f32 on an AMD
// processor, oneDNN computes the product, because MKL, LibTorch's default,
// takes an older code path there (Zen 4, two cores: 220 GFLOP/s against 190 at
// training sizes). oneDNN keeps compiled code for each shape, and
// server/main.cc bounds how much. Products with a LoRA rank have many shapes,
// because tenants' lengths differ, so they go to at::mm.
// Shapes:  a_MK [M, K] contiguous; b_KN [K, N], also a transposed view; of the
//          same dtype, except as above. Returns [M, N] in the dtype of a.
// Errors:  throws c10::Error.
// Threads: any.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN);

// Returns a b + bias_N. An undefined bias adds nothing.
[[nodiscard]] at::Tensor MatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                                const at::Tensor& bias_N);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_MATMUL_H_
