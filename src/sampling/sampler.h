// Draws a token from one row of logits on a CPU. A draw does not depend on
// other rows of the batch.
#ifndef WEFT_SRC_SAMPLING_SAMPLER_H_
#define WEFT_SRC_SAMPLING_SAMPLER_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "src/request/sample.h"

namespace weft::sampling {

// Returns a number in [0, 1) that depends only on the arguments. It has 24
// random bits, from Philox4x32-10 with the key `seed` and the counter
// (sample_index, position). Source: Salmon et al. 2011.
float CounterUniform(uint64_t seed, uint32_t sample_index, uint32_t position);

struct DrawConfig {
  double temperature = 1.0;  // 0 draws the likeliest token, or on a tie the
                             // one with the lowest id.
  int top_k = 0;             // 0 keeps all tokens.
  double top_p = 1.0;        // In (0, 1]; 1 keeps all tokens.
  double min_p = 0;          // In [0, 1]; 0 keeps all tokens.
  int top_logprobs = 0;      // The number of likeliest tokens in the result.
  bool truncated_logprobs = false;  // Log-probabilities are those of the kept
                                    // tokens alone.
  bool support = false;             // The result has the kept tokens.

  // Returns whether a result has more than a token and its log-probability
  // among all tokens.
  bool has_lists() const {
    return top_logprobs > 0 || truncated_logprobs || support;
  }
};

struct DrawResult {
  int32_t token = 0;
  // The token's log-probability in softmax(logits / temperature), without
  // filters or, with truncated_logprobs, among the kept tokens. A temperature
  // of 0 counts as 1 here, and keeps all tokens.
  float logprob = 0;
  TopLogprobs top_logprobs;
  // The ids of the kept tokens, ascending, if wanted. Empty if no filter is
  // set, or if all V are kept.
  std::vector<int32_t> support;
};

// Draws a token by the inverse of the cumulative distribution. `uniform` is the
// random number, in [0, 1).
//
// Without filters, probabilities are summed in the order of token ids. With
// top_k, top_p or min_p, the tokens are first sorted: by logit, highest first,
// and on a tie by id, lowest first. top_k keeps the first k tokens of the
// sorted order. Then top_p keeps the shortest prefix of these tokens, at least
// one, that has at least the share top_p of their total probability. Of this
// prefix min_p keeps the tokens with at least min_p times the first token's
// probability. The draw sums the probabilities of the kept tokens in the sorted
// order. Source of min_p: Nguyen et al. 2024, "Turning up the heat", in the
// order of transformers.
//
// A token with logit -inf is never drawn. Temperature 0 ignores `uniform` and
// the filters. The result has min(top_logprobs, V) top_logprobs in the sorted
// order, of the same distribution as `logprob`; fewer if the filters keep fewer
// and truncated_logprobs is set.
// Shapes:  logits [V] f32, V >= 1. They must be finite or -inf, and not all
// -inf. Otherwise returns nullopt, for example after training diverged.
// Units:   Time is O(V) without filters and O(V log k) for top_k. top_p and
// min_p alone sort as many of the likeliest tokens as they need. The weights of
// all tokens are f32, summed in f32 within blocks and in f64 over blocks. The
// weights of tokens that filters keep are f64. Log-probabilities among all
// tokens take one more pass, which sums as a forward pass does.
// Threads: any.
std::optional<DrawResult> DrawToken(absl::Span<const float> logits,
                                    const DrawConfig& config, float uniform);

// Returns how many of a row's likeliest tokens determine the lists of a result
// and, if log-probabilities or supports depend on the kept tokens, the draw. 0:
// the result has no lists.
size_t ListSize(const DrawConfig& config, size_t vocab);

// The likeliest tokens of a row, of equal logits those with the lowest ids, in
// the order of ids; and the log of the sum of the weights exp((logits - their
// maximum) / temperature) of all the row's tokens, where a temperature of 0
// counts as 1.
struct TokenList {
  absl::Span<const int32_t> tokens;
  absl::Span<const float> logits;
  double log_total = 0;
};

// Returns the result of DrawToken, given at least ListSize tokens of the row,
// which has more. `drawn` is a draw from the whole row without lists. The
// support, and the draw if it depends on the list, have the bits of DrawToken.
// Log-probabilities among all tokens round otherwise. Threads: any.
DrawResult DrawFromList(const TokenList& list, const DrawConfig& config,
                        float uniform, const DrawResult& drawn);

// Returns 128 random bits of Philox4x32-10, a counter-based random number
// generator: they depend only on the counter and the key. Threads: any. Source:
// Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                   std::array<uint32_t, 2> key);

}  // namespace weft::sampling

#endif  // WEFT_SRC_SAMPLING_SAMPLER_H_
