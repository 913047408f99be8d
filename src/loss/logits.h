// Computes the logits of few rows, for example to draw the next tokens.
#ifndef WEFT_SRC_LOSS_LOGITS_H_
#define WEFT_SRC_LOSS_LOGITS_H_

#include <ATen/core/Tensor.h>

#include "src/lora/lora_linear.h"
#include "src/loss/fused_head.h"

namespace weft::loss {

// Returns softcap(hidden W^T + LoRA) in f32, on the device of hidden. A softcap
// of 0 changes nothing. `routing` names the adapters of the rows. If
// shard.group is not null, the weight has this rank's rows, and every rank gets
// the same bits for the whole vocabulary.
// Shapes:  hidden_RH [R, H], weight_VH [V, H] as in fused_head.h. The result
// [R, V] is contiguous.
// Threads: engine thread only.
[[nodiscard]] at::Tensor HeadLogits(const at::Tensor& hidden_RH,
                                    const at::Tensor& weight_VH,
                                    const lora::LoraRouting& routing,
                                    double softcap,
                                    const VocabShard& shard = {});

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_LOGITS_H_
