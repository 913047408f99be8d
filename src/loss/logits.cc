#include "src/loss/logits.h"

#include <ATen/ATen.h>

#include "src/loss/head_lora.h"
#include "src/loss/head_products.h"

namespace weft::loss {

at::Tensor HeadLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                      const lora::LoraRouting& routing, double softcap) {
  const at::ScalarType compute_type = HeadComputeType(weight_VH);
  at::Tensor logits_RV = at::empty({hidden_RH.size(0), weight_VH.size(0)},
                                   weight_VH.options().dtype(compute_type));
  ComputeLogits(hidden_RH, weight_VH, logits_RV);
  const HeadLora lora(routing, compute_type);
  lora.AddLogits(lora.Shrink(hidden_RH), /*chunk_begin=*/0, logits_RV);
  if (softcap > 0) logits_RV.div_(softcap).tanh_().mul_(softcap);
  return logits_RV.to(at::kFloat).to(at::kCPU).contiguous();
}

}  // namespace weft::loss
