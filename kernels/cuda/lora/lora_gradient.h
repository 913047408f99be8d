// Gradients of the adapters' matrices. They are sums over the rows of segments:
// dA += dS^T X and dB += scale dY^T S.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_GRADIENT_H_
#define WEFT_KERNELS_CUDA_LORA_LORA_GRADIENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/lora/lora_product.h"

namespace weft::kernels::cuda {

// Returns the number of floats that AddLoraGradient needs as workspace.
int64_t LoraGradientWorkspace(const LoraProduct& product);

// Adds scale times the products of X and S to the gradients in table.parts, in
// one launch. A gradient is f32 and has the layout of its adapter's weights.
// The order of a gradient's sums depends only on the numbers of rows of the
// segments that share the gradient.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  the formula in f64.
[[nodiscard]] cudaError_t AddLoraGradient(const LoraProduct& product,
                                          cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_GRADIENT_H_
