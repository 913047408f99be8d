// A decoding layer with adapters on CUDA: kernels/cuda/lora_decode.h on
// tensors. model/adapted_decode.h has the order of the calls. A build without
// CUDA does not have these functions.
//
// Legend: as in lora_linear.h. H hidden, F feed-forward, P parts.
#ifndef WEFT_SRC_LORA_LORA_DECODE_CUDA_H_
#define WEFT_SRC_LORA_LORA_DECODE_CUDA_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/lora/lora_cuda.h"
#include "src/ops/activation.h"
#include "src/ops/rotary.h"

namespace weft::lora::cuda {

// What a linear group reads: the rows of its base product, and what the launch
// after that product adds to it.
struct GroupInput {
  at::Tensor rows_TI;
  // The parts of rows A^T, f32. Undefined if no adapter has the group.
  at::Tensor parts;
  int num_parts = 0;
  int part_stride = 0;
  // The sums of a norm, f32. If they are defined, the rows still lack the
  // factor 1 / rms; the launch after the product applies it, before the bias.
  at::Tensor squares_TP;
  double eps = 0;
};

// The norm after an addition to the residual stream, and the group that reads
// it. An undefined weight means that nothing follows.
struct NextNorm {
  at::Tensor weight_H;
  double eps = 0;
  LoraSite site;
};

struct AddedRows {
  at::Tensor x_TH;
  GroupInput next;
};

// Returns whether the functions below take a table and heads of this width.
[[nodiscard]] bool TakesDecode(const RoutingTable& table, int64_t num_rows,
                               int64_t head_features);

// Each function takes one launch, on the current stream, and does not wait.
// All tensors except the parts and sums are bf16, and contiguous. `in` is what
// the base product read.
// Errors:  throw c10::Error.
// Threads: engine thread only.
[[nodiscard]] GroupInput ShrinkRows(const at::Tensor& rows_TI,
                                    const RoutingTable& table,
                                    const LoraSite& site);

// The heads are views of the product without bias. Writes q in place, and k and
// v to the pages alone.
void ExpandHeads(const GroupInput& in, const RoutingTable& table, int layer,
                 const at::Tensor& bias_O, const ops::Heads& heads,
                 const at::Tensor& positions_T, const ops::RotaryTable& rotary,
                 const ops::HeadNorms& norms, const ops::KvSlots& slots);

// Takes the product without bias. Returns the input of down.
[[nodiscard]] GroupInput ExpandGate(const GroupInput& in,
                                    const RoutingTable& table, int layer,
                                    const at::Tensor& bias_O,
                                    ops::Activation activation,
                                    const at::Tensor& gate_up_T2F);

// Takes the product of o or down, with bias, and replaces it by its sum with x.
[[nodiscard]] AddedRows ExpandResidual(const GroupInput& in,
                                       const RoutingTable& table,
                                       const LoraSite& site,
                                       const at::Tensor& x_TH, at::Tensor y_TH,
                                       const NextNorm& next);

}  // namespace weft::lora::cuda

#endif  // WEFT_SRC_LORA_LORA_DECODE_CUDA_H_
