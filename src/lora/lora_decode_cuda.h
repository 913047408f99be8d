// Runs the kernels of kernels/cuda/lora_decode.h on tensors. The kernels
// compute a decoder layer with adapters in a decode step.
// model/adapted_decode.cc calls these functions in order. A build without CUDA
// does not have them.
//
// Legend: as in lora_linear.h. H hidden, F feed-forward, P parts of a sum.
#ifndef WEFT_SRC_LORA_LORA_DECODE_CUDA_H_
#define WEFT_SRC_LORA_LORA_DECODE_CUDA_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/lora/lora_cuda.h"
#include "src/ops/activation.h"
#include "src/ops/rotary.h"

namespace weft::lora::cuda {

// The input of a group of projections: the rows for the base product, and sums
// for the launch that follows the base product.
struct GroupInput {
  at::Tensor rows_TI;
  // Partial sums of rows_TI A^T, in f32. The launch that follows the base
  // product multiplies them by B. Undefined if the table's largest rank for the
  // group is 0.
  at::Tensor parts;
  int num_parts = 0;
  int part_stride = 0;
  // Partial sums of the squares of each row, in f32. If they are defined,
  // rows_TI lacks the factor 1 / rms of its norm. The launch that follows the
  // base product adds the adapters' part, multiplies the sum by this factor,
  // and then adds the bias.
  at::Tensor squares_TP;
  double eps = 0;
};

// The norm that follows an addition to the residual stream, and the group of
// projections that reads the norm's output. If weight_H is undefined, no norm
// follows.
struct NextNorm {
  at::Tensor weight_H;
  double eps = 0;
  LoraSite site;
};

struct AddedRows {
  at::Tensor x_TH;
  GroupInput next;
};

// Returns whether the functions below support the table with this number of
// rows, and heads of this width.
[[nodiscard]] bool TakesDecode(const RoutingTable& table, int64_t num_rows,
                               int64_t head_features);

// The functions below make at most one launch each, on the current stream, and
// do not wait. The caller has computed the base product from `in`. Rows, biases
// and weights of norms are bf16, and rows are contiguous.
// Errors:  throw c10::Error.
// Threads: engine thread only.

// Returns rows_TI and the partial sums of rows_TI A^T for the group at `site`.
[[nodiscard]] GroupInput ShrinkRows(const at::Tensor& rows_TI,
                                    const RoutingTable& table,
                                    const LoraSite& site);

// Adds the adapters' part and the bias to q, k and v, and then applies norms
// and the rotation. `heads` are views of the base product without bias. Writes
// q in place. Writes k and v only to the pages of the KV cache.
void ExpandHeads(const GroupInput& in, const RoutingTable& table, int layer,
                 const at::Tensor& bias_O, const ops::Heads& heads,
                 const at::Tensor& positions_T, const ops::RotaryTable& rotary,
                 const ops::HeadNorms& norms, const ops::KvSlots& slots);

// Adds the adapters' part and the bias to gate and up, and computes the gated
// product. `gate_up_T2F` is the base product without bias. Returns the input of
// the down projection.
[[nodiscard]] GroupInput ExpandGate(const GroupInput& in,
                                    const RoutingTable& table, int layer,
                                    const at::Tensor& bias_O,
                                    ops::Activation activation,
                                    const at::Tensor& gate_up_T2F);

// `y_TH` is the base product of o or down, with bias. Adds the adapters' part
// and x_TH to y_TH in place. Returns y_TH, and the input of next.site.
[[nodiscard]] AddedRows ExpandResidual(const GroupInput& in,
                                       const RoutingTable& table,
                                       const LoraSite& site,
                                       const at::Tensor& x_TH, at::Tensor y_TH,
                                       const NextNorm& next);

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_LORA_DECODE_CUDA_H_
