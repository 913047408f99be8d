// The kernels of a layer that decodes with adapters. Each kernel expands one
// linear group (S B^T) and does the work up to the next base product. A layer
// consists of four base products, attention, RunLoraFewRowsShrink for o, and
// these four launches of the functions below:
//
//   RunLoraHeads     after q, k, v:  expands; normalizes and rotates q and k;
//                                    writes q in place, and k and v to pages
//   RunLoraResidual  after o:        expands; adds to the residual stream; sums
//                                    its squares; shrinks for gate and up
//   RunLoraGate      after gate, up: expands; computes the gated product;
//                                    shrinks for down
//   RunLoraResidual  after down:     expands; adds to the residual stream; sums
//                                    its squares; shrinks for the next q, k, v
//
// An item is the rows of one table entry at some features. A block computes
// several items in turn. No block waits, because no block needs a result of
// another block of its launch. To make this possible, the norm before a group
// is deferred. RunLoraResidual writes u = x * weight and parts of the sum of
// x^2. The next kernel multiplies each row by its factor 1 / rms(x), after the
// products of u with the base weight and with A.
//
// REQUIRES: the table has an entry for every row, even for rows without an
// adapter (LoraTableBuilder::AddBaseRows). No B has a rank above
// kLoraMaxDecodeRank. Rows are bf16 and, except in RunLoraHeads, contiguous.
//
// Rows need no alignment. A NaN stays in its row. Sums are f32, in an order
// that depends only on the widths. So a row's bits depend only on the row and
// its adapter. Grids depend only on the table's limits and on the widths.
//
// Legend: as in lora_few_rows.h, but F is the feed-forward width. H is the
// hidden width, W the width of q, k and v together, P parts of a row's sum of
// squares.
#ifndef WEFT_KERNELS_CUDA_LORA_DECODE_H_
#define WEFT_KERNELS_CUDA_LORA_DECODE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/gated_product.h"
#include "kernels/cuda/lora_few_rows.h"
#include "kernels/cuda/lora_table.h"
#include "kernels/cuda/rotary.h"

namespace weft::kernels::cuda {

// The number of features of an item. From these features, the item computes one
// part of the next group's S and, in RunLoraResidual, one part of the sum of
// squares.
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

// The factor 1 / sqrt(mean(x^2) + eps) by which a kernel multiplies each row of
// the base product plus S B^T. If squares_TP is null, the factor is 1.
struct DeferredNorm {
  const float* squares_TP = nullptr;  // P parts of the sum of x^2.
  int64_t hidden = 0;                 // The number of features of x.
  float eps = 0;
};

struct LoraHeads {
  LoraTable table;
  // The projections q, k and v. `column` is the index of the projection's first
  // element in bias_W.
  LoraProjection projections[3];
  LoraParts shrunk;
  DeferredNorm norm;
  const void* bias_W = nullptr;  // May be null.
  // The base product's heads of q and k are in `rows`, and its heads of v are
  // in slots.v. All are bf16, and the heads of a row are adjacent. RunLoraHeads
  // overwrites q, and writes k and v only to the pages.
  RotaryRows rows;
  HeadNorms norms;  // Must be bf16.
  KvSlots slots;
};
// Expands q, k and v, normalizes and rotates q and k, and stores the results.
// Errors:  cudaErrorInvalidValue for heads of more than kLoraMaxHeadFeatures,
//          and for heads or norms that are not bf16; and those of the launch.
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
  // Gets LoraGateParts(F) parts of the shrink for down. If down.data is null,
  // the kernel leaves out this shrink.
  LoraParts down;
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
  void* sum_TH = nullptr;          // x + y + scale S B^T; may equal y_TH.
  const void* weight_H = nullptr;  // The weight of the next norm; may be null.
  void* scaled_TH = nullptr;       // sum * weight.
  float* squares_TP = nullptr;     // LoraResidualParts(H) parts.
  // LoraResidualParts(H) parts. If next.data is null, nothing is shrunk.
  LoraParts next;
};
// Expands, adds to the residual stream, and shrinks sum * weight for the next
// group. If weight_H is null, writes only sum_TH.
// Source: RunLoraFewRowsExpand, AddRmsNorm, RunLoraFewRowsShrink.
[[nodiscard]] cudaError_t RunLoraResidual(const LoraResidual& residual,
                                          cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_DECODE_H_
