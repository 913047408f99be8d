// Calls the kernels of kernels/cuda/delta/gated_delta.h; see cuda_dispatch.h.
// Private to src/ops. Legend: that of gated_delta.h.
#ifndef WEFT_SRC_OPS_CUDA_DELTA_H_
#define WEFT_SRC_OPS_CUDA_DELTA_H_

#include <ATen/core/Tensor.h>

#include "src/ops/cuda_dispatch.h"
#include "src/ops/delta_plan.h"
#include "src/ops/gated_delta.h"

namespace weft::ops::cuda {

// Computes MixDeltaRows, or MixDeltaStepRows if `plan` is null, of
// delta_rows.h.
DeltaRows MixDeltaRows(const DeltaInputs& inputs,
                       const DeltaParameters& parameters, const DeltaPlan* plan,
                       const at::Tensor& history_QRW);
// Writes the gradient of qkv, given that of q, k and v, which it overwrites.
void MixDeltaRowsBackward(const at::Tensor& d_TW, const DeltaInputs& inputs,
                          const DeltaParameters& parameters,
                          const DeltaPlan& plan, const at::Tensor& into_TW);
// Returns whether the chunks' kernels take rows of this dtype and these heads.
bool TakesDeltaChunks(const at::Tensor& x_THV,
                      const DeltaParameters& parameters);
void RunDeltaChunks(const DeltaRows& rows, const DeltaParameters& parameters,
                    const DeltaPlan& plan, const at::Tensor& states_SHKV,
                    const at::Tensor& u_THV, const at::Tensor& out_THV);
void RunDeltaChunksBackward(const at::Tensor& dout_THV, const DeltaTape& tape,
                            const DeltaParameters& parameters,
                            const DeltaPlan& kept, const DeltaPlan& plan,
                            const at::Tensor& dstates_SHKV, DeltaRows& d);
// Returns whether the step's kernel takes rows of this dtype and these heads.
bool TakesDeltaStep(const at::Tensor& x_THV, const DeltaParameters& parameters);
void RunDeltaStep(const DeltaRows& rows, const DeltaParameters& parameters,
                  const DeltaStates& states, const at::Tensor& out_THV);
void GatedRmsNorm(const at::Tensor& x_THV, const at::Tensor& z_THV,
                  const at::Tensor& weight_V, double eps,
                  const at::Tensor& y_THV);
void GatedRmsNormBackward(const at::Tensor& dy_THV, const at::Tensor& x_THV,
                          const at::Tensor& z_THV, const at::Tensor& weight_V,
                          double eps, const at::Tensor& dx_THV,
                          const at::Tensor& dz_THV);

}  // namespace weft::ops::cuda

#endif  // WEFT_SRC_OPS_CUDA_DELTA_H_
