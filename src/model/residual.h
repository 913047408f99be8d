// The residual stream, its norms, and the addition of outputs to the stream.
//
// Legend: T packed tokens, H hidden.
#ifndef WEFT_SRC_MODEL_RESIDUAL_H_
#define WEFT_SRC_MODEL_RESIDUAL_H_

#include <ATen/core/Tensor.h>

#include "src/parallel/communicator.h"

namespace weft::model {

// The residual stream, and the output of the norm that follows. The next
// product reads normed_TH and frees it. After the last layer, normed_TH is
// undefined.
struct Stream {
  at::Tensor x_TH;
  at::Tensor normed_TH;
};

[[nodiscard]] at::Tensor Norm(const at::Tensor& x_TH,
                              const at::Tensor& weight_H, double eps);

// Sums the tensor over the ranks of the group, in place. Does nothing if
// `group` is null.
void SumOverRanks(parallel::Communicator* group, at::Tensor& partial_TH);

// Returns x + y, or x + norm(y) if out_norm_H is defined. If out_norm_H is
// defined and `raw` is not null, sets `raw` to y. If next_norm_H is defined,
// also returns the sum normed with the weights next_norm_H. Consumes y.
[[nodiscard]] Stream AddOutput(const at::Tensor& x_TH, at::Tensor y_TH,
                               const at::Tensor& out_norm_H,
                               const at::Tensor& next_norm_H, double eps,
                               at::Tensor* raw);

// Returns dLoss/dy of AddOutput. `d_TH` is the gradient of the sum. `raw_TH` is
// y, and is read only if out_norm_H is defined.
[[nodiscard]] at::Tensor AddOutputBackward(const at::Tensor& d_TH,
                                           const at::Tensor& out_norm_H,
                                           double eps,
                                           const at::Tensor& raw_TH);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_RESIDUAL_H_
