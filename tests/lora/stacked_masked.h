// The adapters' part of a linear layer without segments, as an oracle for code
// with segments. It stacks the matrices of all k adapters. In each row, a mask
// multiplies the columns of the row's adapter by the scale, and others by 0.
//
//   S  = mask * (X [A_1 .. A_k]^T)    Y  += S [B_1 .. B_k]^T
//   dS = mask * (dY [B_1 .. B_k])     dX += dS [A_1 .. A_k]
//   dA += dS^T X                      dB += dY^T S
#ifndef WEFT_TESTS_LORA_STACKED_MASKED_H_
#define WEFT_TESTS_LORA_STACKED_MASKED_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"

namespace weft::lora {

// Adds to y [T, O], to dx [T, I] and to the gradients of all versions in the
// routing. Uses plain ATen on dense matrices, in the dtype of the tensors.
void AddStackedAndMasked(const at::Tensor& x_TI, const at::Tensor& dy_TO,
                         const LoraRouting& routing,
                         const LoraGradients& gradients, const LoraSite& site,
                         const model_config::ModelShape& shape,
                         at::Tensor& y_TO, at::Tensor& dx_TI);

}  // namespace weft::lora

#endif  // WEFT_TESTS_LORA_STACKED_MASKED_H_
