// Converts tensors to the argument types of kernels/cuda, for several sources.
// Only sources that a CMakeLists.txt names in weft_asks_for_cuda() include this
// header. DTypeOf, CheckSameType and HeadArguments throw c10::Error for tensors
// that no kernel takes.
#ifndef WEFT_SRC_OPS_CUDA_ARGUMENTS_H_
#define WEFT_SRC_OPS_CUDA_ARGUMENTS_H_

#include <ATen/core/Tensor.h>

#include "kernels/cuda/dtype.h"
#include "kernels/cuda/gated_product.h"
#include "kernels/cuda/rotary.h"
#include "src/ops/activation.h"
#include "src/ops/rotary.h"

namespace weft::ops::cuda {

[[nodiscard]] kernels::cuda::DType DTypeOf(const at::Tensor& tensor);
void CheckSameType(const at::Tensor& a, const at::Tensor& b);
[[nodiscard]] kernels::cuda::GateActivation ActivationOf(Activation activation);
[[nodiscard]] kernels::cuda::HeadRows RowsOfHeads(const at::Tensor& x_TMC);

// The kernels' arguments for PrepareHeads and its backward pass. `rows` and
// `norms` have pointers to `positions`, `q_C` and `k_C`, which may be copies.
// `slots` is empty if head_slots.slots_T is undefined.
struct HeadArguments {
  HeadArguments(const Heads& heads, const at::Tensor& positions_T,
                const RotaryTable& table, const HeadNorms& head_norms,
                const KvSlots& head_slots);

  at::Tensor positions, q_C, k_C;
  kernels::cuda::RotaryRows rows;
  kernels::cuda::HeadNorms norms;
  kernels::cuda::KvSlots slots;
};

}  // namespace weft::ops::cuda

#endif  // WEFT_SRC_OPS_CUDA_ARGUMENTS_H_
