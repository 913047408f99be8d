// The gated unit of a feed-forward layer: out = activation(gate) * up.
// kClampedSilu also changes `up`.
// Legend: T rows, F features.
#ifndef WEFT_KERNELS_CUDA_GATED_PRODUCT_H_
#define WEFT_KERNELS_CUDA_GATED_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// SiLU, the tanh form of GELU, and the clamped SiLU of gpt-oss.
enum class GateActivation { kSilu, kGeluTanh, kClampedSilu };

// Computes the gated product of each row, in f32.
// Shapes:  gate_up [T, 2F], with the gate in the first F columns; out [T, F];
//          both contiguous and of `dtype`.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  reference::SwiGluRow, GeGluRow, ClampedSwiGluRow.
[[nodiscard]] cudaError_t GatedProduct(DType dtype, GateActivation activation,
                                       int64_t num_rows, int64_t features,
                                       const void* gate_up_T2F, void* out_TF,
                                       cudaStream_t stream);

// Replaces gate_up by its gradient, with dgate in the first F columns and dup
// in the last F. `dout` is the gradient of out. Threads as for GatedProduct.
// Source: reference::SwiGluBackwardRow, GeGluBackwardRow,
// ClampedSwiGluBackwardRow.
[[nodiscard]] cudaError_t GatedProductBackward(
    DType dtype, GateActivation activation, int64_t num_rows, int64_t features,
    const void* dout_TF, void* gate_up_T2F, cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_GATED_PRODUCT_H_
