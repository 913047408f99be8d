// Products of segments of rows with their adapters' matrices: the shrink x A^T,
// the expand y += scale s B^T, and their transposed forms in the backward pass.
// Legend: T packed rows, I inputs and O outputs of one item.
#ifndef WEFT_KERNELS_CUDA_LORA_PRODUCT_H_
#define WEFT_KERNELS_CUDA_LORA_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace weft::kernels::cuda {

// Rows and columns that one block computes.
inline constexpr int64_t kLoraTileSide = 64;
// Rows that one item has at most; longer segments are several items.
inline constexpr int64_t kLoraItemRows = kLoraTileSide;

// Rows [row, row + num_rows) of x and y, and one adapter's matrix:
//   y[:, y_column + o] (+)= scale * sum over i of x[:, x_column + i] W(i, o).
struct LoraProductItem {
  int64_t row = 0;
  int64_t num_rows = 0;  // <= kLoraItemRows; 0: nothing.
  int64_t x_column = 0;
  int64_t num_inputs = 0;  // I; 0: the product is 0.
  int64_t y_column = 0;
  int64_t num_outputs = 0;       // O.
  const void* weight = nullptr;  // bf16, contiguous, of the product's order.
  float scale = 1;
};

// How an item's weight lies: a linear layer's [O, I], as in the forward pass,
// or [I, O], the same matrix seen from the backward pass.
enum class LoraWeightOrder { kOutputsByInputs, kInputsByOutputs };

struct LoraProduct {
  const LoraProductItem* items = nullptr;  // On the device.
  int64_t num_items = 0;
  int64_t max_outputs = 0;  // The largest O of an item.
  LoraWeightOrder order = LoraWeightOrder::kOutputsByInputs;
  bool adds = false;           // To what y has; otherwise y is overwritten.
  const void* x_TI = nullptr;  // bf16, as y; strides in elements.
  int64_t x_stride = 0;
  void* y_TO = nullptr;
  int64_t y_stride = 0;
  // Parts that the sum over the inputs is cut into, 1 to 64: more blocks where
  // the rows alone make few. `workspace` takes LoraProductWorkspace floats.
  int num_splits = 1;
  float* workspace = nullptr;
};

[[nodiscard]] int64_t LoraProductWorkspace(const LoraProduct& product);

// Runs all items in one launch, or two with splits. No two items may write the
// same element. Sums in f32 in an order that depends on the sizes and
// num_splits alone; a NaN stays in its row of x or its output.
// Errors:  cudaErrorInvalidValue for splits out of range.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  reference::SkinnyProduct; segments as in Punica (Chen et al. 2023).
[[nodiscard]] cudaError_t RunLoraProduct(const LoraProduct& product,
                                         cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_PRODUCT_H_
