// LoRA's part of a linear layer for segments of few rows, as in decoding. The
// time goes to latency and to reading A and B, not to the multiplications.
//
//   shrink   parts = x A^T, each over some of the features
//   expand   S = sum of the parts; y += scale S B^T for all projections
//
// The shrink and the expansion are one launch each, and no block waits for
// another. A block of the shrink computes parts of S. A block of the expansion
// adds up the parts that it needs, in a fixed order.
//
// Rounding: parts and sums are f32. S is rounded to bf16 before it is
// multiplied with B, and y is rounded after the addition. A row's result
// depends only on that row, its adapter and the widths.
//
// Legend: as in lora_table.h. I inputs, O outputs of the (fused) layer.
#ifndef WEFT_KERNELS_CUDA_LORA_LORA_FEW_ROWS_H_
#define WEFT_KERNELS_CUDA_LORA_LORA_FEW_ROWS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/lora/lora_product.h"
#include "kernels/cuda/lora/lora_table.h"

namespace weft::kernels::cuda {

// The parts of S, f32 [rows of all entries, count, stride]. Rows are in the
// order of LoraFewRows::place. A part of a row has one sum for each rank,
// padded to `stride`.
struct LoraParts {
  float* data = nullptr;
  int count = 0;
  int stride = 0;
};
// Returns LoraParts::stride: max_rank, rounded up for 16-byte loads.
constexpr int LoraPartStride(int64_t max_rank) {
  return static_cast<int>((max_rank + 3) / 4 * 4);
}

struct LoraFewRowsProduct {
  LoraTable table;
  int64_t slot_of_a = 0;  // The slot of all projections' stacked A.
  int64_t max_rank = 0;   // The largest R in slot_of_a; 0: no work.
  // Each projection's slot of B and its columns of y.
  LoraProjection projections[kMaxLoraProjections];
  int num_projections = 0;
  int64_t max_projection_rank = 0;  // The largest R of all projections.
  const void* x_TI = nullptr;       // bf16, like y and S; strides in elements.
  int64_t x_stride = 0;
  int64_t inputs = 0;    // I.
  void* y_TO = nullptr;  // Only the expansion uses y.
  int64_t y_stride = 0;
  void* shrunk_TR = nullptr;  // If null, S is not kept.
  int64_t shrunk_stride = 0;
  float* workspace = nullptr;  // For the parts: LoraFewRowsWorkspace floats.
};

int64_t LoraFewRowsWorkspace(const LoraFewRowsProduct& product);
// Returns the parts that RunLoraFewRowsShrink writes to the workspace.
LoraParts LoraFewRowsParts(const LoraFewRowsProduct& product);

// Writes the parts of S for all entries, in one launch. A NaN stays in its row
// of x or its rank of A. The grid depends only on the table's limits, on
// max_rank and on the widths, so that a recorded launch serves every batch
// within these limits.
// Threads: any; the work is queued on `stream`, and nothing waits for it.
// Source:  the formula in f64; segments as in Punica (Chen et al. 2023).
[[nodiscard]] cudaError_t RunLoraFewRowsShrink(
    const LoraFewRowsProduct& product, cudaStream_t stream);

// Adds up the parts of S, and adds scale S B^T to y, in one launch. If
// shrunk_TR is not null, also writes S for the entries' rows and the
// projections' ranks, and leaves the rest of shrunk_TR unchanged.
[[nodiscard]] cudaError_t RunLoraFewRowsExpand(
    const LoraFewRowsProduct& product, cudaStream_t stream);

// Adds up the parts of S and writes S to shrunk_TR, in one launch. Does not use
// y.
[[nodiscard]] cudaError_t RunLoraFewRowsSum(const LoraFewRowsProduct& product,
                                            cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_LORA_FEW_ROWS_H_
