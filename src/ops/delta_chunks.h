// The gated delta rule in chunks, over the rows of prefix trees. Private to
// src/ops. Legend: that of gated_delta.h, and C rows of a chunk.
//
// For a chunk with the start state S0, let G be the running sum of g, and all
// exponents e^(G_t - G_i) have i <= t, so that they are at most 0:
//
//   A[t, i] = beta_t e^(G_t - G_i) (k_t . k_i)  for i < t
//   U = (I + A)^-1 diag(beta) (V - diag(e^G) K S0)
//   W[t, i] = e^(G_t - G_i) (q_t . k_i)  for i <= t
//   O = diag(e^G) Q S0 + W U
//   S1 = e^G_C S0 + (diag(e^(G_C - G)) K)^T U
#ifndef WEFT_SRC_OPS_DELTA_CHUNKS_H_
#define WEFT_SRC_OPS_DELTA_CHUNKS_H_

#include <ATen/core/Tensor.h>

#include "src/ops/delta_plan.h"
#include "src/ops/gated_delta.h"

namespace weft::ops {

// Writes the outputs of all rows to out_THV, and, if u_THV is defined, u of the
// rule. Reads and writes states_SHKV by the plan, and by its slots if it has
// some.
void RunDeltaChunks(const DeltaRows& rows, const DeltaParameters& parameters,
                    const DeltaPlan& plan, const at::Tensor& states_SHKV,
                    const at::Tensor& u_THV, const at::Tensor& out_THV);

// Returns the gradients of the rows, given dout = dLoss/dout. `kept` is the
// plan with which RunDeltaChunks filled the tape, and `plan` the one whose
// nodes have one state each.
DeltaRows RunDeltaChunksBackward(const at::Tensor& dout_THV,
                                 const DeltaTape& tape,
                                 const DeltaParameters& parameters,
                                 const DeltaPlan& kept, const DeltaPlan& plan);

// Computes one row of each sequence by the rule itself, and replaces the states
// in the sequences' slots.
void RunDeltaStep(const DeltaRows& rows, const DeltaParameters& parameters,
                  const DeltaStates& states, const at::Tensor& out_THV);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_DELTA_CHUNKS_H_
