// Draws tokens from the logits of a batch's rows.
//
// Legend: R rows, V vocabulary.
#ifndef WEFT_SRC_SAMPLING_DRAW_ROWS_H_
#define WEFT_SRC_SAMPLING_DRAW_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "src/sampling/sampler.h"

namespace weft::sampling {

// The rule for one draw, and the values that determine the draw's random number
// (CounterUniform).
struct DrawRule {
  DrawConfig config;
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint32_t position = 0;  // Number of tokens that the sample already has.
  int32_t row = 0;        // Row of the logits. Several rules may share a row.
};

// Returns one entry for each rule: the draw, or nullopt if the logits of the
// rule's row are not a distribution.
//
// On a CPU, DrawToken draws. On a CUDA device, kernels::cuda::SampleTokens
// draws, and only tokens and log-probabilities are copied to the host. For
// rules with lists (DrawConfig), the likeliest tokens of the row are copied,
// too (ListSize), and DrawFromList finds the lists. A row of which so many are
// needed is copied whole, and DrawToken draws from it. Except for rounding,
// both draw the same token.
// Shapes:  logits_RV [R, V] f32 contiguous, V >= 1. Each rule's row is in
// [0, R).
// Errors:  throws c10::Error.
// Threads: engine thread only; waits for the device.
std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_H_
