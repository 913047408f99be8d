// Sampling requests and results. The server has validated the requests.
#ifndef WEFT_SRC_REQUEST_SAMPLE_H_
#define WEFT_SRC_REQUEST_SAMPLE_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "src/request/token_support.h"

namespace weft {

// The conditions that end a sample before max_tokens. The matching tokens stay
// in the output.
struct StopRule {
  bool ignore_eos = false;  // If true, EOS tokens do not end a sample.
  std::vector<int32_t> token_ids;
  std::vector<std::vector<int32_t>> token_sequences;
  std::vector<std::string> byte_strings;
};

struct SamplingConfig {
  int max_tokens = 128;
  double temperature = 1.0;  // 0 draws the likeliest token.
  int top_k = 0;             // 0 keeps all tokens.
  double top_p = 1.0;
  uint64_t seed = 0;
  StopRule stop;
  double min_p = 0;  // In [0, 1]; 0 keeps all tokens.
  // Changes of the logits, in the order of sampling.proto.
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::vector<std::pair<int32_t, float>> logit_bias;  // Of distinct tokens.
  std::vector<int32_t> allowed_token_ids;             // Empty: all.
  int min_tokens = 0;  // Tokens that a sample has before it may stop.

  bool has_penalties() const {
    return repetition_penalty != 1 || presence_penalty != 0 ||
           frequency_penalty != 0;
  }
  // Returns whether a draw may leave out tokens of the vocabulary.
  bool truncates() const {
    return temperature != 0 && (top_k > 0 || top_p < 1 || min_p > 0 ||
                                !allowed_token_ids.empty() || min_tokens > 0);
  }
};

struct SampleRequest {
  std::string adapter_id;  // Empty: the base model.
  std::string tenant;      // Who samples; counts for the base model only.
  std::string snapshot;    // Empty: the latest version.
  // Samples from this checkpoint of `adapter_id` instead, whether or not there
  // is such an adapter. Empty: from the adapter.
  std::string checkpoint = {};
  // The checkpoint must be the one that was created then. InfinitePast: the one
  // that is there.
  absl::Time checkpoint_created_at = absl::InfinitePast();
  std::vector<int32_t> prompt;
  int num_samples = 1;
  SamplingConfig config;
  bool prompt_logprobs = false;
  int top_logprobs = 0;
  int prompt_top_logprobs = 0;
  // How many of the prompt's last tokens the two above score; 0: all.
  int64_t prompt_logprobs_last_n = 0;
  // Tokens to score: those of position i + 1 of the prompt are [offsets[i],
  // offsets[i + 1]). Both are empty if there are none.
  std::vector<int32_t> prompt_targets;
  std::vector<int64_t> prompt_target_offsets;  // [P].
  // The tokens to draw at each position of the prompt but the first.
  int prompt_alternatives = 0;
  bool return_routing = false;
  // Scores are those of the distribution that top_k, top_p and min_p leave.
  bool truncated_logprobs = false;
  bool return_support = false;
  // The id of the record that the engine keeps of the samples
  // (sample_record.h). Empty: it keeps none.
  std::string record;
  // The experts and the supports are for the record alone: the samples have
  // none.
  bool hide_routing = false;
  bool hide_support = false;
  // Before each token a sample takes the adapter's latest weights. It keeps the
  // keys that earlier weights computed, or computes them again.
  bool in_flight = false;
  bool recompute_cache = false;
  absl::Time deadline = absl::InfiniteFuture();
  std::shared_ptr<void> charge = nullptr;  // See step.h.

  // Returns the tokens of the prompt, and those that may be drawn.
  int64_t num_tokens() const {
    return static_cast<int64_t>(prompt.size()) +
           static_cast<int64_t>(config.max_tokens) * num_samples;
  }
  bool has_support() const { return return_support && config.truncates(); }
  // Returns the top_k of the draws: with supports, at most kMaxSupport.
  int draw_top_k() const {
    if (!has_support()) return config.top_k;
    return config.top_k == 0 ? kMaxSupport
                             : std::min(config.top_k, kMaxSupport);
  }
  // Returns the first position of the prompt, >= 1, that prompt_logprobs and
  // prompt_top_logprobs score.
  int64_t first_of_last_n() const {
    const auto length = static_cast<int64_t>(prompt.size());
    return prompt_logprobs_last_n == 0
               ? 1
               : std::max<int64_t>(1, length - prompt_logprobs_last_n);
  }
  // Returns the first position of the prompt, >= 1, that has a score or a draw;
  // the prompt's length if there is none.
  int64_t first_scored() const;
};

enum class FinishReason : uint8_t { kNone, kStop, kLength };

// The most likely tokens of one position, as pairs of token and logprob, most
// likely first.
using TopLogprobs = std::vector<std::pair<int32_t, float>>;

// The version that drew some tokens of a sample, one after another.
struct VersionSpan {
  uint64_t version = 0;
  uint32_t tokens = 0;

  friend bool operator==(const VersionSpan&, const VersionSpan&) = default;
};

struct Sample {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  std::vector<TopLogprobs> top_logprobs;
  FinishReason finish_reason = FinishReason::kNone;
  // The experts [P + S - 1, L, K] of the P prompt tokens and of the S drawn
  // tokens except the last, for L layers with experts and K experts per token.
  // Empty unless requested. In a stream, only the sample's last delta has them.
  std::vector<uint16_t> routing = {};
  // The supports of the drawn tokens. Empty unless requested, and if nothing
  // truncates the draws.
  TokenSupport support = {};
  // Names the sample in its record. Empty without one. In a stream, only the
  // sample's last delta has it.
  std::string sequence_id = {};
  // The versions that drew the tokens, in order, if the request is in flight.
  std::vector<VersionSpan> version_spans = {};
};

struct SampleResult {
  std::vector<Sample> samples;
  std::vector<float> prompt_logprobs;
  std::vector<TopLogprobs> prompt_top_logprobs;  // The first entry is empty.
  std::vector<float> prompt_target_logprobs;     // One for each target.
  // The draws, not in the order of likelihood. The first entry is empty.
  std::vector<TopLogprobs> prompt_alternatives;
  int64_t prompt_cached_tokens = 0;  // Those that were not computed again.
  uint64_t version = 0;  // Scored the prompt and drew the first tokens.
};

// Tokens that were drawn since the sample's previous delta.
struct SampleDelta {
  int sample_index = 0;
  Sample piece;
  // The prompt's scores are set in the request's first delta, if requested.
  std::vector<float> prompt_logprobs;
  std::vector<TopLogprobs> prompt_top_logprobs;
  std::vector<float> prompt_target_logprobs;
  std::vector<TopLogprobs> prompt_alternatives;
  int64_t prompt_cached_tokens = 0;
  uint64_t version = 0;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_SAMPLE_H_
