// AdamW and gradient clipping for the flat buffers of one adapter.
// Legend: N parameters of the adapter.
#ifndef WEFT_SRC_LOSS_ADAMW_H_
#define WEFT_SRC_LOSS_ADAMW_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/request/train.h"

namespace weft::loss {

// Returns the L2 norm of the gradient, accumulated in f64. It is not finite if
// the gradient holds a NaN or an infinity.
double GradientNorm(const at::Tensor& gradient_N);

// Returns the factor by which a step multiplies the gradient that it reads:
// min(1, max_grad_norm / (grad_norm + 1e-6)), as clip_grad_norm_ does, or 1 if
// max_grad_norm is 0. A NaN norm gives NaN.
double GradientScale(double max_grad_norm, double grad_norm);

// Returns whether the gradient after clipping has a square that f32 holds. If
// not, AdamWStep would make second moments infinite, and the weights would stay
// as they are for ever. Returns false for a norm that is not finite.
bool SquareFits(double max_grad_norm, double grad_norm);

// Makes one AdamW step, as torch.optim.AdamW does, of the gradient times
// GradientScale. With the new moments m and v,
//   weights_out = weights * (1 - lr * decay)
//                 - lr / (1 - beta1^step) * m
//                   / (sqrt(v / (1 - beta2^step)) + eps)
// Shapes:  all [N] f32 contiguous on one device. The moments are updated in
// place. weights_out may be weights itself, or another buffer if the old
// weights are still needed.
// Units:   step is the number of this update, from 1.
// Errors:  throws c10::Error, which names the argument, and changes nothing.
// Threads: engine thread only.
// Source:  Loshchilov and Hutter 2019.
void AdamWStep(const AdamWConfig& config, int64_t step, double grad_norm,
               const at::Tensor& weights_N, const at::Tensor& gradient_N,
               at::Tensor& moment1_N, at::Tensor& moment2_N,
               at::Tensor& weights_out_N);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_ADAMW_H_
