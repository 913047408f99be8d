// Draws a token from one row of logits, in plain floats. The draw does not
// depend on the rest of the batch.
#ifndef WEFT_SRC_SAMPLING_SAMPLER_H_
#define WEFT_SRC_SAMPLING_SAMPLER_H_

#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "src/request/sample.h"

namespace weft::sampling {

// Returns a number in [0, 1) that depends only on these three values. 24 bits
// of Philox4x32-10, key = seed, counter = (sample index, position).
// Source: Salmon et al. 2011; known-answer test against Random123's vectors.
[[nodiscard]] float CounterUniform(uint64_t seed, uint32_t sample_index,
                                   uint32_t position);

struct DrawConfig {
  double temperature = 1.0;  // 0: the most likely token, lowest id on a tie.
  int top_k = 0;             // 0: all.
  double top_p = 1.0;
  int top_logprobs = 0;
};

struct DrawResult {
  int32_t token = 0;
  float logprob = 0;  // Under softmax(logits / T), unfiltered; T = 1 for T = 0.
  TopLogprobs top_logprobs;
};

// Draws by inverse cumulative distribution with `uniform` in [0, 1).
//
// Unfiltered, tokens are summed in order of id. With top_k or top_p they are
// first sorted by logit, highest first, lower id first on a tie. top_k keeps
// the first k of that order. top_p then keeps the shortest prefix whose
// probability, renormalised over what top_k kept, reaches top_p (at least one
// token). The draw sums in that order. A token of logit -inf is never drawn;
// temperature 0 ignores `uniform` and the filters. top_logprobs has
// min(top_logprobs, V) entries in the same order, unfiltered and
// temperature-scaled as `logprob`.
// Shapes: logits [V] f32, V >= 1, finite (-inf allowed, not all). Otherwise, as
// after a training that diverged, returns none.
// Units:   O(V) unfiltered; O(V log k) for top_k; top_p alone sorts as many of
//          the likeliest tokens as it needs. Unfiltered weights are f32, summed
//          in f32 within blocks and in f64 over blocks; filtered ones are f64.
//          No allocation when neither filters nor top_logprobs are asked for.
// Threads: any.
[[nodiscard]] std::optional<DrawResult> DrawToken(
    absl::Span<const float> logits, const DrawConfig& config, float uniform);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_SAMPLER_H_
