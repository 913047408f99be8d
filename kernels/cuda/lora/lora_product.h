// LoRA's part of a linear layer: products of each segment (consecutive rows of
// one adapter) with its adapter's matrices. lora_gradient.h has the gradients
// of the matrices.
//
//   shrink   S = X A^T          dS = scale dY B
//   expand   Y += scale S B^T   dX += dS A
//
// Legend: as in lora_table.h. X [T, F] is the matrix with features: x, y or the
// gradient of either. If a layer stacks projections, each has its own F and its
// own columns of X.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_PRODUCT_H_
#define WEFT_KERNELS_CUDA_LORA_LORA_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/lora/lora_table.h"

namespace weft::kernels::cuda {

// A projection: its slot in the table, and its columns of X.
struct LoraProjection {
  int64_t slot = 0;
  int64_t column = 0;    // The first column.
  int64_t features = 0;  // F.
};

// The order of a contiguous matrix in memory: A is [R, F], and B is [F, R].
enum class LoraOrder { kRankByFeatures, kFeaturesByRank };

struct LoraProduct {
  LoraTable table;
  LoraOrder order = LoraOrder::kRankByFeatures;
  LoraProjection projections[kMaxLoraProjections];
  int num_projections = 0;
  int64_t max_rank = 0;         // The largest R of the slots; 0: no work.
  void* features_TF = nullptr;  // X, bf16 like S; strides in elements.
  int64_t features_stride = 0;
  void* shrunk_TR = nullptr;  // S.
  int64_t shrunk_stride = 0;
  // The workspace has LoraShrinkWorkspace or LoraGradientWorkspace floats.
  // `counters` has LoraCounters zeros, and each launch leaves them zero.
  float* workspace = nullptr;
  unsigned* counters = nullptr;
};

// Returns the number of floats that RunLoraShrink needs as workspace.
int64_t LoraShrinkWorkspace(const LoraProduct& product);
// Returns the number of counters that RunLoraShrink and AddLoraGradient need.
int64_t LoraCounters(const LoraProduct& product);

// Writes S at the rows of table.blocks and the ranks of their adapters, in one
// launch, and leaves the rest of S unchanged. Sums are f32, in an order that
// depends only on the number of features and the number of rows of the segment.
// A NaN in X stays in its row, and a NaN in a matrix stays in its rank.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  the formula in f64; segments as in Punica (Chen et al. 2023).
[[nodiscard]] cudaError_t RunLoraShrink(const LoraProduct& product,
                                        cudaStream_t stream);

// Adds scale times the products of S and the matrices to X, in one launch
// without workspace. A NaN in S stays in its row, and a NaN in a matrix stays
// in its feature. Threads and source as for RunLoraShrink.
[[nodiscard]] cudaError_t RunLoraExpand(const LoraProduct& product,
                                        cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_PRODUCT_H_
