// Logits of the rows that sample. Only the head computes logits: this is its
// small form, for a handful of rows whose logits are really wanted.
#ifndef WEFT_SRC_LOSS_LOGITS_H_
#define WEFT_SRC_LOSS_LOGITS_H_

#include <ATen/core/Tensor.h>

namespace weft::loss {

// hidden W^T in f32, on the CPU.
// Shapes:  hidden_RH [R, H], weight_VH [V, H] in the model dtype; returns [R,
// V]
//          f32, contiguous.
// Threads: engine thread only.
[[nodiscard]] at::Tensor HeadLogits(const at::Tensor& hidden_RH,
                                    const at::Tensor& weight_VH,
                                    double softcap);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_LOGITS_H_
