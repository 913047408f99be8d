#include "src/model/residual.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/ops/rms_norm.h"

namespace weft::model {

at::Tensor Norm(const at::Tensor& x_TH, const at::Tensor& weight_H,
                double eps) {
  at::Tensor y_TH = at::empty_like(x_TH);
  ops::RmsNorm(x_TH, weight_H, eps, y_TH);
  return y_TH;
}

void SumOverRanks(parallel::Communicator* group, at::Tensor& partial_TH) {
  if (group != nullptr) group->AllReduce(partial_TH);
}

Stream AddOutput(const at::Tensor& x_TH, at::Tensor y_TH,
                 const at::Tensor& out_norm_H, const at::Tensor& next_norm_H,
                 double eps, at::Tensor* raw) {
  if (out_norm_H.defined()) {
    at::Tensor normed_TH = Norm(y_TH, out_norm_H, eps);
    if (raw != nullptr) *raw = std::move(y_TH);
    y_TH = std::move(normed_TH);
  }
  if (!next_norm_H.defined()) return {.x_TH = y_TH.add_(x_TH)};
  at::Tensor normed_TH = at::empty_like(y_TH);
  ops::AddRmsNorm(x_TH, next_norm_H, eps, y_TH, normed_TH);
  return {.x_TH = std::move(y_TH), .normed_TH = std::move(normed_TH)};
}

at::Tensor AddOutputBackward(const at::Tensor& d_TH,
                             const at::Tensor& out_norm_H, double eps,
                             const at::Tensor& raw_TH) {
  if (!out_norm_H.defined()) return d_TH;
  at::Tensor d_raw_TH = at::zeros_like(raw_TH);
  ops::RmsNormBackward(d_TH, raw_TH, out_norm_H, eps, d_raw_TH);
  return d_raw_TH;
}

}  // namespace weft::model
