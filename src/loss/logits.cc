#include "src/loss/logits.h"

#include <ATen/ATen.h>

#include "src/loss/head_lora.h"
#include "src/loss/head_products.h"

namespace weft::loss {

at::Tensor HeadLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                      const lora::LoraRouting& routing, double softcap) {
  at::Tensor logits_RV = ComputeLogits(hidden_RH, weight_VH);
  const HeadLora lora(routing, logits_RV.scalar_type());
  lora.AddLogits(lora.Shrink(hidden_RH), /*chunk_begin=*/0, logits_RV);
  if (softcap > 0) logits_RV.div_(softcap).tanh_().mul_(softcap);
  return logits_RV.to(at::kFloat).to(at::kCPU).contiguous();
}

}  // namespace weft::loss
