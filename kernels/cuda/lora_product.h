// The adapters' part of a linear layer: products of segments of rows with their
// adapters' matrices and, in lora_gradient.h, those matrices' gradients.
//
//   shrink   S = X A^T          dS = scale dY B
//   expand   Y += scale S B^T   dX += dS A
//
// Legend: as lora_table.h. X [T, F] is the features' side of a product: x, y or
// a gradient of them. In a stacked layer one projection has F of its columns.
#ifndef WEFT_KERNELS_CUDA_LORA_PRODUCT_H_
#define WEFT_KERNELS_CUDA_LORA_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/lora_table.h"

namespace weft::kernels::cuda {

// The matrices of one slot, and their columns of X.
struct LoraProjection {
  int64_t slot = 0;
  int64_t column = 0;
  int64_t features = 0;  // F.
};

// The layout of a contiguous matrix: A [R, F] or B [F, R].
enum class LoraOrder { kRankByFeatures, kFeaturesByRank };

struct LoraProduct {
  LoraTable table;
  LoraOrder order = LoraOrder::kRankByFeatures;
  LoraProjection projections[kMaxLoraProjections];
  int num_projections = 0;
  int64_t max_rank = 0;  // The largest R of these slots; 0: nothing to do.
  void* features_TF = nullptr;  // bf16, as S; strides in elements.
  int64_t features_stride = 0;
  void* shrunk_TR = nullptr;
  int64_t shrunk_stride = 0;
  // As many floats as the function's ...Workspace returns, and LoraCounters
  // zeros. Each launch leaves the counters zero.
  float* workspace = nullptr;
  unsigned* counters = nullptr;
};

// Floats of workspace.
[[nodiscard]] int64_t LoraShrinkWorkspace(const LoraProduct& product);
// Returns the counters that a shrink or a gradient takes.
[[nodiscard]] int64_t LoraCounters(const LoraProduct& product);

// Writes S for the segments' rows and ranks, and leaves the rest of S. One
// launch. Sums are f32 in an order that depends only on the segment's rows and
// the features. A NaN stays in its row of X or its rank.
// Threads: any; the work is queued on `stream`, nothing is waited for.
// Source:  the formula in f64; segments as in Punica (Chen et al. 2023).
[[nodiscard]] cudaError_t RunLoraShrink(const LoraProduct& product,
                                        cudaStream_t stream);

// Adds to X from S, one launch without workspace. Otherwise as RunLoraShrink.
[[nodiscard]] cudaError_t RunLoraExpand(const LoraProduct& product,
                                        cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_PRODUCT_H_
