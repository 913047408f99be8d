#include "src/loss/logits.h"

#include <ATen/ATen.h>

namespace weft::loss {

at::Tensor HeadLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                      double softcap) {
  at::Tensor logits_RV;
  if (hidden_RH.scalar_type() == at::kFloat) {
    logits_RV = at::mm(hidden_RH, weight_VH.t());
  } else if (hidden_RH.is_cuda()) {
    logits_RV = at::mm(hidden_RH, weight_VH.t(), at::kFloat);
  } else {
    logits_RV = at::mm(hidden_RH.to(at::kFloat), weight_VH.to(at::kFloat).t());
  }
  if (softcap > 0) logits_RV = at::tanh(logits_RV / softcap) * softcap;
  return logits_RV.to(at::kFloat).to(at::kCPU).contiguous();
}

}  // namespace weft::loss
