#include "src/loss/logits.h"

#include <ATen/ATen.h>

#include <vector>

#include "src/loss/head_lora.h"
#include "src/loss/head_products.h"

namespace weft::loss {
namespace {

// Joins the columns of all ranks' logits. The ranks' numbers of columns differ
// by at most one, so each rank pads its part to the largest number.
at::Tensor GatherColumns(const at::Tensor& logits_RV, const VocabShard& shard) {
  const int size = shard.group->shard().size;
  const int64_t width = (shard.vocab + size - 1) / size;
  at::Tensor padded_VR =
      at::zeros({width, logits_RV.size(0)}, logits_RV.options());
  padded_VR.narrow(0, 0, logits_RV.size(1)).copy_(logits_RV.t());
  const at::Tensor all_SVR = shard.group->AllGather(padded_VR);
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < size; ++rank) {
    const parallel::Shard part{.rank = rank, .size = size};
    parts.push_back(all_SVR[rank].narrow(0, 0, part.Of(shard.vocab).size()));
  }
  return at::cat(parts).t();
}

}  // namespace

at::Tensor HeadLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                      const lora::LoraRouting& routing, double softcap,
                      const VocabShard& shard) {
  const at::ScalarType compute_type = HeadComputeType(weight_VH);
  at::Tensor logits_RV = at::empty({hidden_RH.size(0), weight_VH.size(0)},
                                   weight_VH.options().dtype(compute_type));
  ComputeLogits(hidden_RH, weight_VH, logits_RV);
  const HeadLora lora(routing, compute_type);
  lora.AddLogits(lora.Shrink(hidden_RH), /*chunk_begin=*/0, logits_RV);
  if (softcap > 0) logits_RV.div_(softcap).tanh_().mul_(softcap);
  if (shard.group != nullptr) logits_RV = GatherColumns(logits_RV, shard);
  return logits_RV.to(at::kFloat).contiguous();
}

}  // namespace weft::loss
