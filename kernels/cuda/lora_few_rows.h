// The adapters' part of a linear layer for segments of few rows, as in
// decoding. Its time depends on latency and on the bytes of the matrices, not
// on the multiplications.
//
//   shrink   parts = x A^T, each over some of the features
//   expand   S = sum of the parts; y += scale S B^T for all projections
//
// Each of the two is one launch. A block of the shrink ends after one
// reduction, and no block waits for another one. The expansion adds the parts
// that it needs, in order.
//
// Rounding: parts and sums are f32. S is rounded to bf16 before it is
// multiplied with B, and y is rounded after the addition, as in lora_product.h.
// A row's result depends only on that row, its adapter and the widths.
//
// Legend: as in lora_table.h. I inputs, O outputs of the (fused) layer.
#ifndef WEFT_KERNELS_CUDA_LORA_FEW_ROWS_H_
#define WEFT_KERNELS_CUDA_LORA_FEW_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/lora_product.h"
#include "kernels/cuda/lora_table.h"

namespace weft::kernels::cuda {

// The parts of S, f32: `count` for each row of the entries, of `stride` ranks,
// row by row in the order of LoraFewRows::place.
struct LoraParts {
  float* data = nullptr;
  int count = 0;
  int stride = 0;
};
// Returns the stride: the ranks, padded for wide loads.
constexpr int LoraPartStride(int64_t max_rank) {
  return static_cast<int>((max_rank + 3) / 4 * 4);
}

struct LoraFewRowsProduct {
  LoraTable table;
  int64_t slot_of_a = 0;  // The stacked A of all projections.
  int64_t max_rank = 0;   // The slot's largest R; 0: no work.
  // B and columns of y for each projection.
  LoraProjection projections[kMaxLoraProjections];
  int num_projections = 0;
  int64_t max_projection_rank = 0;  // The largest R of the slots in
                                    // `projections`.
  const void* x_TI = nullptr;       // bf16, like y and S; strides in elements.
  int64_t x_stride = 0;
  int64_t inputs = 0;    // I.
  void* y_TO = nullptr;  // Only the expansion uses y.
  int64_t y_stride = 0;
  void* shrunk_TR = nullptr;  // If null, S is not kept.
  int64_t shrunk_stride = 0;
  float* workspace = nullptr;  // For the parts: LoraFewRowsWorkspace floats.
};

[[nodiscard]] int64_t LoraFewRowsWorkspace(const LoraFewRowsProduct& product);
// Returns the parts that RunLoraFewRowsShrink writes to the workspace.
[[nodiscard]] LoraParts LoraFewRowsParts(const LoraFewRowsProduct& product);

// Writes the parts, in one launch. A NaN stays in its row of x or its rank of
// A. The grid depends only on the table's limits, on max_rank and on the
// widths, so that a recorded launch serves every batch within them.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  the formula in f64; segments as in Punica (Chen et al. 2023).
[[nodiscard]] cudaError_t RunLoraFewRowsShrink(
    const LoraFewRowsProduct& product, cudaStream_t stream);

// Adds to y from the parts, in one launch. If S is kept, writes S for the
// entries' rows and the projections' ranks, and leaves the rest of S unchanged.
[[nodiscard]] cudaError_t RunLoraFewRowsExpand(
    const LoraFewRowsProduct& product, cudaStream_t stream);

// Writes S from the parts and does not change y, in one launch.
[[nodiscard]] cudaError_t RunLoraFewRowsSum(const LoraFewRowsProduct& product,
                                            cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_FEW_ROWS_H_
