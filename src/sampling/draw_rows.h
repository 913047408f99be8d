// Logits to tokens for the rows of a batch, where the logits are.
// Legend: R rows, V vocabulary.
#ifndef WEFT_SRC_SAMPLING_DRAW_ROWS_H_
#define WEFT_SRC_SAMPLING_DRAW_ROWS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "src/sampling/sampler.h"

namespace weft::sampling {

// How a token is drawn, and its place in the stream of random numbers.
struct DrawRule {
  DrawConfig config;
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint32_t position = 0;  // Tokens that the sample has already.
  int32_t row = 0;  // Row of the logits; samples of one prompt share a row.
};

// One draw for each rule; none from logits that are no distribution.
//
// On a CPU DrawToken draws. On a device kernels::cuda::SampleTokens draws, and
// only tokens and log-probabilities come to the host. Rules with top_logprobs
// are the exception: their logits come to the host too, where DrawToken draws.
// Both draw the same token, except where rounding decides.
// Shapes:  logits_RV [R, V] f32 contiguous, V >= 1; rules of these rows.
// Errors:  throws c10::Error.
// Threads: engine thread only; waits for the device.
[[nodiscard]] std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_H_
