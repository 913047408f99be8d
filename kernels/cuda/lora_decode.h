// The kernels of a layer that decodes with adapters. Each kernel expands one
// linear group (S B^T) and does the work up to the next base product. A layer
// launches four base products, attention, RunLoraFewRowsShrink for o, and the
// functions below four times:
//
//   LoraHeads     after q, k, v:  expands; norms and rotates the heads; writes
//                                 q, and k and v to the pages
//   LoraResidual  after o:        expands; adds to the residual stream; sums
//                                 its squares; shrinks for gate and up
//   LoraGate      after gate, up: expands; computes the gated product; shrinks
//                                 for down
//   LoraResidual  after down:     expands; adds to the residual stream; sums
//                                 its squares; shrinks for the next q, k and v
//
// A block computes the rows of one table entry at some features. It needs
// nothing that another block of its launch computes, so no block waits. For
// this, the norm before a group is deferred: LoraResidual writes u = x * weight
// and parts of the sum of x^2. The next kernel multiplies by 1 / rms(x), a
// factor of the row, after the products of u with W and A.
//
// REQUIRES: the table has an entry for every row, also for rows without an
// adapter (LoraTableBuilder::AddBaseRows). A NaN stays in its row. Sums are
// f32, in an order that depends only on the widths. So a row's bits depend only
// on the row and its adapter. Grids depend only on the table's limits and on
// the widths. Rows are contiguous bf16 and need no alignment.
//
// Legend: as in lora_few_rows.h. H hidden, F feed-forward, W the width of q, k
// and v together, P parts.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_H_
#define WEFT_KERNELS_CUDA_LORA_DECODE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/gated_product.h"
#include "kernels/cuda/lora_few_rows.h"
#include "kernels/cuda/lora_table.h"
#include "kernels/cuda/rotary.h"

namespace weft::kernels::cuda {

// The number of features of a row that a block computes. They make one part of
// the next group's S and, in LoraResidual, one part of the sum of squares.
inline constexpr int64_t kLoraResidualFeatures = 256;
inline constexpr int64_t kLoraGateFeatures = 512;
constexpr int64_t LoraResidualParts(int64_t hidden) {
  return (hidden + kLoraResidualFeatures - 1) / kLoraResidualFeatures;
}
constexpr int64_t LoraGateParts(int64_t features) {
  return (features + kLoraGateFeatures - 1) / kLoraGateFeatures;
}
// The most features of a head that RunLoraHeads accepts.
inline constexpr int64_t kLoraMaxHeadFeatures = 256;

// The factor 1 / rms(x) by which a kernel multiplies each row of the base
// product and of its expansion. If squares_TP is null, the factor is 1.
struct DeferredNorm {
  const float* squares_TP = nullptr;  // P parts of the sum of x^2.
  int64_t hidden = 0;                 // The number of features of x.
  float eps = 0;
};

struct LoraHeads {
  LoraTable table;
  // The projections q, k and v. `column` is the projection's first bias
  // element.
  LoraProjection projections[3];
  LoraParts shrunk;
  DeferredNorm norm;
  const void* bias_W = nullptr;  // May be null.
  // The base product: its heads of q and k, and in slots.v its heads of v. They
  // are bf16, and the heads of a row are adjacent. q is overwritten. k and v
  // are written only to the pages.
  RotaryRows rows;
  HeadNorms norms;  // bf16.
  KvSlots slots;
};
// Expands q, k and v, norms and rotates q and k, and stores the results.
// Errors:  cudaErrorInvalidValue for heads of more than kLoraMaxHeadFeatures,
//          and for heads or norms that are not bf16.
// Threads: any, as for the functions below; the work is queued on `stream`, and
//          nothing waits for it.
// Source:  RunLoraFewRowsExpand, then Rotary.
[[nodiscard]] cudaError_t RunLoraHeads(const LoraHeads& heads,
                                       cudaStream_t stream);

struct LoraGate {
  LoraTable table;
  int64_t slots_of_b[2] = {};  // The slots of gate's B and up's B.
  int64_t slot_of_a = 0;       // The slot of down's A.
  int64_t features = 0;        // F.
  LoraParts shrunk;
  DeferredNorm norm;
  GateActivation activation = GateActivation::kSilu;
  const void* gate_up_T2F = nullptr;
  const void* bias_2F = nullptr;  // May be null.
  void* out_TF = nullptr;
  LoraParts down;  // LoraGateParts(F) parts. Null data: nothing is shrunk.
};
// Expands gate and up, writes their gated product, and shrinks it for down.
// Source: RunLoraFewRowsExpand, GatedProduct, RunLoraFewRowsShrink.
[[nodiscard]] cudaError_t RunLoraGate(const LoraGate& gate,
                                      cudaStream_t stream);

struct LoraResidual {
  LoraTable table;
  int64_t slot_of_b = 0;
  int64_t slot_of_a = 0;  // The slot of the next group's A.
  int64_t hidden = 0;     // H.
  LoraParts shrunk;
  const void* y_TH = nullptr;      // The base product.
  const void* x_TH = nullptr;      // The residual stream.
  void* sum_TH = nullptr;          // x + y + scale S B^T; may be y.
  const void* weight_H = nullptr;  // The next norm's. Null: no norm, no `next`.
  void* scaled_TH = nullptr;       // sum * weight.
  float* squares_TP = nullptr;     // LoraResidualParts(H) parts.
  LoraParts next;  // LoraResidualParts(H) parts. Null data: nothing is shrunk.
};
// Expands, adds to the residual stream, and shrinks sum * weight for the next
// group.
// Source: RunLoraFewRowsExpand, AddRmsNorm, RunLoraFewRowsShrink.
[[nodiscard]] cudaError_t RunLoraResidual(const LoraResidual& residual,
                                          cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_DECODE_H_
