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
  int32_t row = 0;  // Of the logits; the samples of a prompt draw from one.
};

// One draw for each rule; none from logits that are no distribution. On a CPU
// DrawToken; on a device kernels::cuda::SampleTokens, after which tokens and
// log-probabilities alone come to the host, with the logits of the rows that
// want top_logprobs: those are drawn on the host. Both draw the same but where
// rounding decides.
// Shapes:  logits_RV [R, V] f32 contiguous, V >= 1; rules of these rows.
// Errors:  throws c10::Error.
// Threads: engine thread only; waits for the device.
[[nodiscard]] std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_H_
