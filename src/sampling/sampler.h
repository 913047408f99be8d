// Draws a token from one row of logits, in plain floats. A draw does not depend
// on the rest of the batch.
#ifndef WEFT_SRC_SAMPLING_SAMPLER_H_
#define WEFT_SRC_SAMPLING_SAMPLER_H_

#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "src/request/sample.h"

namespace weft::sampling {

// Returns a number in [0, 1) that depends only on the three arguments. It is 24
// bits of Philox4x32-10 with key = seed and counter = (sample index, position).
// Source: Salmon et al. 2011; the known-answer test uses Random123's vectors.
[[nodiscard]] float CounterUniform(uint64_t seed, uint32_t sample_index,
                                   uint32_t position);

struct DrawConfig {
  double temperature = 1.0;  // 0 draws the likeliest token, the lowest id on a
                             // tie.
  int top_k = 0;             // 0: all.
  double top_p = 1.0;
  int top_logprobs = 0;
};

struct DrawResult {
  int32_t token = 0;
  float logprob = 0;  // Under unfiltered softmax(logits / T). If T = 0, it is 1
                      // here.
  TopLogprobs top_logprobs;
};

// Draws by inverse cumulative distribution with `uniform` in [0, 1).
//
// Without filters, tokens are summed in order of id. With top_k or top_p they
// are first sorted: by logit, highest first, and on a tie by id, lowest first.
// top_k keeps the first k tokens of that order. top_p then keeps the shortest
// prefix whose probability, renormalised over what top_k kept, reaches top_p;
// it keeps at least one token. The draw sums in that order.
//
// A token with logit -inf is never drawn. Temperature 0 ignores `uniform` and
// the filters. top_logprobs has min(top_logprobs, V) entries in sorted order,
// without filters and at the same temperature as `logprob`.
// Shapes:  logits [V] f32, V >= 1. They must be finite or -inf, and not all
//          -inf. Otherwise, for example after training diverged, returns none.
// Units:   O(V) without filters; O(V log k) for top_k; top_p alone sorts as
//          many of the likeliest tokens as it needs. Weights without filters
//          are f32, summed in f32 within blocks and in f64 over blocks;
//          filtered weights are f64. Allocates only for filters or
//          top_logprobs.
// Threads: any.
[[nodiscard]] std::optional<DrawResult> DrawToken(
    absl::Span<const float> logits, const DrawConfig& config, float uniform);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_SAMPLER_H_
