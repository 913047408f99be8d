// The adapters' part of a linear layer: products of segments of rows with their
// adapters' matrices. lora_gradient.h has the gradients of the matrices.
//
//   shrink   S = X A^T          dS = scale dY B
//   expand   Y += scale S B^T   dX += dS A
//
// Legend: as in lora_table.h. X [T, F] is the side of a product that has
// features: x, y or a gradient of them. In a stacked layer, each projection has
// F of its columns.
#ifndef WEFT_KERNELS_CUDA_LORA_PRODUCT_H_
#define WEFT_KERNELS_CUDA_LORA_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/lora_table.h"

namespace weft::kernels::cuda {

// The matrices of one slot, and the columns of X to which they belong.
struct LoraProjection {
  int64_t slot = 0;
  int64_t column = 0;
  int64_t features = 0;  // F.
};

// The layout of a contiguous matrix: A is [R, F], B is [F, R].
enum class LoraOrder { kRankByFeatures, kFeaturesByRank };

struct LoraProduct {
  LoraTable table;
  LoraOrder order = LoraOrder::kRankByFeatures;
  LoraProjection projections[kMaxLoraProjections];
  int num_projections = 0;
  int64_t max_rank = 0;         // The largest R of the slots; 0: no work.
  void* features_TF = nullptr;  // bf16, like S; strides in elements.
  int64_t features_stride = 0;
  void* shrunk_TR = nullptr;
  int64_t shrunk_stride = 0;
  // As many floats as the function's ...Workspace returns, and LoraCounters
  // zeros. Each launch leaves the counters zero.
  float* workspace = nullptr;
  unsigned* counters = nullptr;
};

// Returns the number of floats that RunLoraShrink needs as workspace.
[[nodiscard]] int64_t LoraShrinkWorkspace(const LoraProduct& product);
// Returns the number of counters that a shrink or a gradient needs.
[[nodiscard]] int64_t LoraCounters(const LoraProduct& product);

// Writes S for the segments' rows and ranks, in one launch, and leaves the rest
// of S unchanged. Sums are f32, in an order that depends only on the segment's
// rows and the features. A NaN stays in its row of X or its rank.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  the formula in f64; segments as in Punica (Chen et al. 2023).
[[nodiscard]] cudaError_t RunLoraShrink(const LoraProduct& product,
                                        cudaStream_t stream);

// Adds to X from S, in one launch without workspace. Otherwise like
// RunLoraShrink.
[[nodiscard]] cudaError_t RunLoraExpand(const LoraProduct& product,
                                        cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_PRODUCT_H_
