// The residual stream: the norms that read it, and the outputs that are added
// to it.
//
// Legend: T packed tokens, H hidden.
#ifndef WEFT_SRC_MODEL_RESIDUAL_H_
#define WEFT_SRC_MODEL_RESIDUAL_H_

#include <ATen/core/Tensor.h>

#include "src/parallel/communicator.h"

namespace weft::model {

// The residual stream, and its norm, which the next product reads and frees.
struct Stream {
  at::Tensor x_TH;
  at::Tensor normed_TH;
};

[[nodiscard]] at::Tensor Norm(const at::Tensor& x_TH,
                              const at::Tensor& weight_H, double eps);

// Sums over the ranks of the group, in place. Does nothing if it is null.
void SumOverRanks(parallel::Communicator* group, at::Tensor& partial_TH);

// Returns x + y, or x + norm(y) if out_norm_H is defined (`raw`, which may be
// null, then gets y). Applies next_norm_H to the sum unless it is undefined.
// Consumes y.
[[nodiscard]] Stream AddOutput(const at::Tensor& x_TH, at::Tensor y_TH,
                               const at::Tensor& out_norm_H,
                               const at::Tensor& next_norm_H, double eps,
                               at::Tensor* raw);

// Returns dLoss/dy of AddOutput, given dLoss/d(x + norm(y)).
[[nodiscard]] at::Tensor AddOutputBackward(const at::Tensor& d_TH,
                                           const at::Tensor& out_norm_H,
                                           double eps,
                                           const at::Tensor& raw_TH);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_RESIDUAL_H_
