// The matrix products of the head. Private to src/loss.
//
// In all of src/loss, the head's weight may be in 8 bits (ops/int8_weight.h). V
// and H are then the sizes of the dequantized weight. Products dequantize to
// f32 on a CPU and to bf16 on CUDA. The logits of few rows on CUDA are an
// exception: their product does not round the dequantized weight
// (ops::Int8FewRows).
//
// Legend: R rows, H hidden, V vocabulary.
#ifndef WEFT_SRC_LOSS_HEAD_PRODUCTS_H_
#define WEFT_SRC_LOSS_HEAD_PRODUCTS_H_

#include <ATen/core/Tensor.h>

namespace weft::loss {

// Returns the dtype of logits, statistics and U: f64 for f64 weights, otherwise
// f32.
[[nodiscard]] at::ScalarType HeadComputeType(const at::Tensor& weight_VH);

// Computes logits = hidden W^T, with sums in f32 or wider.
// Shapes: logits_RV in the compute type; the others as in ScoreHead.
void ComputeLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                   at::Tensor& logits_RV);

// Computes out = p W, which is a sum over the vocabulary. On a CPU, sums by
// blocks keep the rounding errors of few rows as small as those of many rows.
// Shapes: out_RH in the compute type, and on a CPU p_RV too.
void ComputeProjection(const at::Tensor& p_RV, const at::Tensor& weight_VH,
                       at::Tensor& out_RH);

// Computes out = p W without blocks of small probabilities. A block of the
// vocabulary adds to a row only if one of the row's probabilities in the block
// is at least the row's filter [R], or is NaN.
// Source: the gradient filter of Wijmans et al. 2024, but by rows instead of
// tiles, so that a row's result does not depend on other rows.
void ComputeFilteredProjection(const at::Tensor& p_RV,
                               const at::Tensor& weight_VH,
                               const at::Tensor& filter_R, at::Tensor& out_RH);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_PRODUCTS_H_
