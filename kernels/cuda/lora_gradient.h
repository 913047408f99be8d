// Gradients of the adapters' matrices, sums over the rows of a segment: dA +=
// dS^T X and dB += scale dY^T S.
// Legend: T packed rows, P and Q columns of an item's two matrices.
#ifndef WEFT_KERNELS_CUDA_LORA_GRADIENT_H_
#define WEFT_KERNELS_CUDA_LORA_GRADIENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::kernels::cuda {

// Rows [row, row + num_rows) of p and q, any number of them:
//   gradient[i, j] += scale * sum over t of p[t, p_column + i] q[t, q_column +
//   j].
struct LoraGradientItem {
  int64_t row = 0;
  int64_t num_rows = 0;  // 0: nothing is added.
  int64_t p_column = 0;
  int64_t num_p = 0;  // P.
  int64_t q_column = 0;
  int64_t num_q = 0;             // Q.
  float* gradient_PQ = nullptr;  // Contiguous.
  float scale = 1;
};

struct LoraGradient {
  const LoraGradientItem* items = nullptr;  // On the device.
  int64_t num_items = 0;
  int64_t max_p = 0;  // The largest P and Q of an item.
  int64_t max_q = 0;
  const void* p_TP = nullptr;  // bf16, as q; strides in elements.
  int64_t p_stride = 0;
  const void* q_TQ = nullptr;
  int64_t q_stride = 0;
  // Parts that the rows of each item are cut into, 1 to 64. `workspace` takes
  // LoraGradientWorkspace floats.
  int num_splits = 1;
  float* workspace = nullptr;
};

[[nodiscard]] int64_t LoraGradientWorkspace(const LoraGradient& gradient);

// Runs all items in one launch, or two with splits. No two items may have
// elements of a gradient in common. Sums in f32 in an order that depends on the
// sizes and num_splits alone.
// Errors:  cudaErrorInvalidValue for splits out of range.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  the formula in f64.
[[nodiscard]] cudaError_t AddLoraGradient(const LoraGradient& gradient,
                                          cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_GRADIENT_H_
