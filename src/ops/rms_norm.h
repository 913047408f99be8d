// Root-mean-square norm over the last dimension: y = x / rms(x) * w.
// Legend: T rows (packed tokens, or heads of tokens), D features.
#ifndef WEFT_SRC_OPS_RMS_NORM_H_
#define WEFT_SRC_OPS_RMS_NORM_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// Writes y = x * rsqrt(mean(x^2) + eps) * weight. y may be x.
// Shapes:  x_TD, y_TD [T, D] with unit stride in D, any row stride; weight_D
//          [D]. All have one dtype, but the weight may be f32 if x is
//          narrower. Computes in f32, or in f64 for f64.
// Threads: engine thread only.   Source: Zhang and Sennrich 2019.
void RmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
             at::Tensor& y_TD);

// Computes sum += x and then y = RmsNorm(sum), with the same bits as two
// separate operations.
// Shapes: those of RmsNorm, sum_TD like x_TD; none aliases another.
void AddRmsNorm(const at::Tensor& x_TD, const at::Tensor& weight_D, double eps,
                at::Tensor& sum_TD, at::Tensor& y_TD);

// Adds dLoss/dx to dx, given dy = dLoss/dy.
// Shapes: those of RmsNorm, dy and dx like x. dx may not alias dy or x.
void RmsNormBackward(const at::Tensor& dy_TD, const at::Tensor& x_TD,
                     const at::Tensor& weight_D, double eps, at::Tensor& dx_TD);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_RMS_NORM_H_
