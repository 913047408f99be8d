// The convolution, norms and gates before the gated delta rule. Private to
// src/ops. Legend: that of gated_delta.h.
#ifndef WEFT_SRC_OPS_DELTA_ROWS_H_
#define WEFT_SRC_OPS_DELTA_ROWS_H_

#include <ATen/core/Tensor.h>

#include "src/ops/delta_plan.h"
#include "src/ops/gated_delta.h"

namespace weft::ops {

// Returns the rows of the rule. If the plan's roots continue sequences,
// history_QRW has the rows before them, otherwise it is undefined.
DeltaRows MixDeltaRows(const DeltaInputs& inputs,
                       const DeltaParameters& parameters, const DeltaPlan& plan,
                       const at::Tensor& history_QRW);

// Returns the rows of the rule, where row i is the next one of sequence i, and
// replaces the rows before the convolution in the sequences' slots.
DeltaRows MixDeltaStepRows(const DeltaInputs& inputs,
                           const DeltaParameters& parameters,
                           const DeltaStates& states);

// Writes the gradients of the inputs, given those of the rows. Overwrites the
// latter. No root continues a sequence.
void MixDeltaRowsBackward(const DeltaRows& gradient, const DeltaInputs& inputs,
                          const DeltaParameters& parameters,
                          const DeltaPlan& plan, const DeltaInputs& into);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_DELTA_ROWS_H_
