// A decoding layer with adapters: the expansion of each linear group, joined
// with the work up to the next base product. A layer has its four base
// products, attention, RunLoraFewRowsShrink for o, and four launches of the
// functions below:
//
//   LoraHeads     after q, k, v:  expansion; norms and rotation of the heads;
//                                 q, and the pages of k and v
//   LoraResidual  after o:        expansion; the residual stream; its norm's
//                                 sums; the parts of the shrink of gate and up
//   LoraGate      after gate, up: expansion; gated product; the parts of the
//                                 shrink of down
//   LoraResidual  after down:     the same, with the next layer's q, k, v
//
// A block computes the rows of an entry at some features, and needs nothing
// that another block of its launch computes. So no block waits, and none reads
// a whole matrix or the squares of a whole row. For this the norm is deferred:
// LoraResidual writes u = x * weight and sums of x^2, and 1 / rms(x), which is
// a factor of the row, is applied after the products of u with W and A.
//
// The table has an entry for every row, also for those without an adapter
// (LoraTableBuilder::AddBaseRows). A NaN stays in its row. Sums are f32, in an
// order that depends only on the widths, so that the bits of a row depend on
// nothing but the row and its adapter. Grids depend only on the table's limits
// and on the widths. Rows are contiguous bf16 and may begin anywhere.
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

// The features of a row that a block computes. They are those of one part, both
// of S and of a norm's sum.
inline constexpr int64_t kLoraResidualFeatures = 256;
inline constexpr int64_t kLoraGateFeatures = 512;
constexpr int64_t LoraResidualParts(int64_t hidden) {
  return (hidden + kLoraResidualFeatures - 1) / kLoraResidualFeatures;
}
constexpr int64_t LoraGateParts(int64_t features) {
  return (features + kLoraGateFeatures - 1) / kLoraGateFeatures;
}
// The most features of a head that LoraHeads takes.
inline constexpr int64_t kLoraMaxHeadFeatures = 256;

// The factor 1 / rms(x) of every row, which the rows' product still lacks. If
// squares_TP is null, the factor is 1.
struct DeferredNorm {
  const float* squares_TP = nullptr;  // Sums of x^2; P parts.
  int64_t hidden = 0;
  float eps = 0;
};

struct LoraHeads {
  LoraTable table;
  // Those of q, k and v. `column` is where the projection begins in the bias.
  LoraProjection projections[3];
  LoraParts shrunk;
  DeferredNorm norm;
  const void* bias_W = nullptr;  // May be null.
  // The heads in the product: q, k and slots.v, bf16, with adjacent heads. q is
  // overwritten. k and v go to the pages alone.
  RotaryRows rows;
  HeadNorms norms;  // bf16.
  KvSlots slots;
};
// Errors:  cudaErrorInvalidValue for heads of more than kLoraMaxHeadFeatures,
//          and for heads or norms that are not bf16.
// Threads: any, as for the functions below; the work is queued on `stream`, and
//          nothing waits for it.
// Source:  lora_few_rows.h and Rotary.
[[nodiscard]] cudaError_t RunLoraHeads(const LoraHeads& heads,
                                       cudaStream_t stream);

struct LoraGate {
  LoraTable table;
  int64_t slots_of_b[2] = {};  // Those of gate and up.
  int64_t slot_of_a = 0;       // That of down.
  int64_t features = 0;        // F.
  LoraParts shrunk;
  DeferredNorm norm;
  GateActivation activation = GateActivation::kSilu;
  const void* gate_up_T2F = nullptr;
  const void* bias_2F = nullptr;  // May be null.
  void* out_TF = nullptr;
  LoraParts down;  // LoraGateParts(F). Without data, nothing is shrunk.
};
// Source: lora_few_rows.h and GatedProduct.
[[nodiscard]] cudaError_t RunLoraGate(const LoraGate& gate,
                                      cudaStream_t stream);

struct LoraResidual {
  LoraTable table;
  int64_t slot_of_b = 0;
  int64_t slot_of_a = 0;  // That of the next group.
  int64_t hidden = 0;     // H.
  LoraParts shrunk;
  const void* y_TH = nullptr;  // The product.
  const void* x_TH = nullptr;
  void* sum_TH = nullptr;          // x + y; may be y.
  const void* weight_H = nullptr;  // The next norm's; null: there is none.
  void* scaled_TH = nullptr;       // sum * weight.
  float* squares_TP = nullptr;     // LoraResidualParts(H).
  LoraParts next;  // LoraResidualParts(H). Without data, nothing is shrunk.
};
// Source: lora_few_rows.h and AddRmsNorm.
[[nodiscard]] cudaError_t RunLoraResidual(const LoraResidual& residual,
                                          cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_LORA_DECODE_H_
