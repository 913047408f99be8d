// Validation of SamplingService's requests; see request_validation.h.
#include <sys/random.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "server/wire/field_checks.h"
#include "server/wire/request_validation.h"
#include "src/base/status_macros.h"
#include "src/request/field_names.h"

namespace weft::server {
namespace {

constexpr uint32_t kDefaultMaxTokens = 128;
constexpr int kMaxStopTokens = 64;
constexpr size_t kMaxStopBytes = 256;

uint64_t DrawSeed() {
  uint64_t seed = 0;
  if (getrandom(&seed, sizeof(seed), 0) != sizeof(seed)) {
    // getrandom hardly ever fails. If it does, the time is a good enough seed.
    seed = static_cast<uint64_t>(absl::GetCurrentTimeNanos());
  }
  return seed;
}

// Returns an id that no other record has.
std::string DrawRecordId() {
  return absl::StrCat(absl::Hex(DrawSeed(), absl::kZeroPad16),
                      absl::Hex(DrawSeed(), absl::kZeroPad16));
}

absl::StatusOr<std::vector<int32_t>> ReadIds(
    absl::string_view field,
    const google::protobuf::RepeatedField<uint32_t>& ids, int vocab_size) {
  std::vector<int32_t> out(ids.begin(), ids.end());
  WEFT_RETURN_IF_ERROR(CheckIds(field, out, vocab_size));
  return out;
}

absl::StatusOr<StopRule> ReadStop(const v1::StopRule& in,
                                  const RequestLimits& limits) {
  const auto entries = static_cast<size_t>(in.token_ids_size()) +
                       static_cast<size_t>(in.token_sequences_size()) +
                       static_cast<size_t>(in.byte_strings_size());
  if (entries > kMaxStopEntries) {
    return BadField("config.stop", "has ", entries,
                    " entries, must be at most ", kMaxStopEntries);
  }
  StopRule out{.ignore_eos = in.ignore_eos()};
  WEFT_ASSIGN_OR_RETURN(
      out.token_ids,
      ReadIds("config.stop.token_ids", in.token_ids(), limits.vocab_size));
  for (int i = 0; i < in.token_sequences_size(); ++i) {
    const auto& tokens = in.token_sequences(i).tokens();
    const std::string path =
        absl::StrCat("config.stop.token_sequences[", i, "].tokens");
    if (tokens.empty() || tokens.size() > kMaxStopTokens) {
      return BadField(path, "has ", tokens.size(), " values, must be in [1, ",
                      kMaxStopTokens, "]");
    }
    WEFT_ASSIGN_OR_RETURN(std::vector<int32_t> sequence,
                          ReadIds(path, tokens, limits.vocab_size));
    out.token_sequences.push_back(std::move(sequence));
  }
  for (int i = 0; i < in.byte_strings_size(); ++i) {
    const std::string& bytes = in.byte_strings(i);
    if (bytes.empty() || bytes.size() > kMaxStopBytes) {
      return BadField(absl::StrCat("config.stop.byte_strings[", i, "]"), "has ",
                      bytes.size(), " bytes, must be in [1, ", kMaxStopBytes,
                      "]");
    }
    out.byte_strings.push_back(bytes);
  }
  if (!out.byte_strings.empty() && !limits.has_byte_decoder) {
    return absl::FailedPreconditionError(absl::StrCat(
        NameOfField("config.stop.byte_strings"),
        " needs a tokenizer.json in the model folder that is byte-level or has "
        "byte fallback; use ids of tokens"));
  }
  return out;
}

absl::Status ReadPenalties(const v1::SamplingConfig& in, SamplingConfig* out) {
  const double repetition =
      in.has_repetition_penalty() ? in.repetition_penalty() : 1;
  WEFT_RETURN_IF_ERROR(CheckReal("config.repetition_penalty", repetition,
                                 {.low = 0.01, .high = 100}));
  WEFT_RETURN_IF_ERROR(CheckReal("config.presence_penalty",
                                 in.presence_penalty(),
                                 {.low = -2, .high = 2}));
  WEFT_RETURN_IF_ERROR(CheckReal("config.frequency_penalty",
                                 in.frequency_penalty(),
                                 {.low = -2, .high = 2}));
  out->repetition_penalty = static_cast<float>(repetition);
  out->presence_penalty = static_cast<float>(in.presence_penalty());
  out->frequency_penalty = static_cast<float>(in.frequency_penalty());
  return absl::OkStatus();
}

absl::Status ReadBiases(const v1::SamplingConfig& in, int vocab_size,
                        SamplingConfig* out) {
  if (in.logit_bias_size() > kMaxLogitBiases) {
    return BadField("config.logit_bias", "has ", in.logit_bias_size(),
                    " entries, must be at most ", kMaxLogitBiases);
  }
  std::set<int32_t> tokens;
  for (int i = 0; i < in.logit_bias_size(); ++i) {
    const auto token = static_cast<int32_t>(in.logit_bias(i).token());
    const std::string path = absl::StrCat("config.logit_bias[", i, "]");
    if (token < 0 || token >= vocab_size) {
      return BadField(absl::StrCat(path, ".token"), "is ",
                      in.logit_bias(i).token(), ", must be in [0, ", vocab_size,
                      ")");
    }
    WEFT_RETURN_IF_ERROR(CheckReal(absl::StrCat(path, ".bias"),
                                   in.logit_bias(i).bias(),
                                   {.low = -100, .high = 100}));
    if (!tokens.insert(token).second) {
      return BadField(absl::StrCat(path, ".token"), "is ", token, " again");
    }
    out->logit_bias.emplace_back(token, in.logit_bias(i).bias());
  }
  return absl::OkStatus();
}

// Reads which tokens may be drawn, after `out->stop` and `out->max_tokens`.
absl::Status ReadAllowed(const v1::SamplingConfig& in,
                         const RequestLimits& limits, SamplingConfig* out) {
  if (in.allowed_token_ids_size() > limits.vocab_size) {
    return BadField("config.allowed_token_ids", "has ",
                    in.allowed_token_ids_size(), " values, must be at most ",
                    limits.vocab_size);
  }
  WEFT_ASSIGN_OR_RETURN(out->allowed_token_ids,
                        ReadIds("config.allowed_token_ids",
                                in.allowed_token_ids(), limits.vocab_size));
  WEFT_RETURN_IF_ERROR(CheckCount("config.min_tokens", in.min_tokens(), 0,
                                  static_cast<uint64_t>(out->max_tokens)));
  out->min_tokens = static_cast<int>(in.min_tokens());
  if (out->min_tokens == 0) return absl::OkStatus();
  std::set<int32_t> ends(out->stop.token_ids.begin(),
                         out->stop.token_ids.end());
  if (!out->stop.ignore_eos) {
    ends.insert(limits.eos_token_ids.begin(), limits.eos_token_ids.end());
  }
  const bool only_ends =
      out->allowed_token_ids.empty()
          ? ends.size() == static_cast<size_t>(limits.vocab_size)
          : std::ranges::all_of(out->allowed_token_ids, [&](int32_t token) {
              return ends.contains(token);
            });
  if (!only_ends) return absl::OkStatus();
  return BadField("config.min_tokens", "is ", out->min_tokens,
                  ", must be 0: all tokens that may be drawn end "
                  "a sample");
}

absl::StatusOr<SamplingConfig> ReadConfig(const v1::SamplingConfig& in,
                                          size_t prompt_length,
                                          const RequestLimits& limits) {
  const auto room = static_cast<uint32_t>(limits.context_length) -
                    static_cast<uint32_t>(prompt_length);
  // A prompt that the cache has no room for is refused later.
  const auto fitting = static_cast<uint32_t>(std::clamp<int64_t>(
      limits.cached_tokens - static_cast<int64_t>(prompt_length), 1, room));
  const uint32_t asked =
      in.max_tokens() == 0 ? kDefaultMaxTokens : in.max_tokens();
  const bool is_default = in.max_tokens() == 0 || asked == kAllThatFit;
  const uint32_t max_tokens = is_default ? std::min(asked, fitting) : asked;
  if (max_tokens > room) {
    return BadField("config.max_tokens", "is ", max_tokens, ", must be in [1, ",
                    room, "]: context length ", limits.context_length,
                    " less the prompt's ", prompt_length);
  }
  SamplingConfig out;
  out.max_tokens = static_cast<int>(max_tokens);
  // A top_k above the size of the vocabulary means the whole vocabulary.
  out.top_k = static_cast<int>(
      std::min(in.top_k(), static_cast<uint32_t>(limits.vocab_size)));
  if (in.has_temperature()) out.temperature = in.temperature();
  if (in.has_top_p()) out.top_p = in.top_p();
  if (out.temperature != 0) {
    const absl::Status valid = CheckReal("config.temperature", out.temperature,
                                         {.low = 1e-8, .high = 1e8});
    if (!valid.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(valid.message(), " or 0 for the likeliest token"));
    }
  }
  WEFT_RETURN_IF_ERROR(CheckReal("config.top_p", out.top_p,
                                 {.low = 0, .high = 1, .low_open = true}));
  out.min_p = in.min_p();
  WEFT_RETURN_IF_ERROR(
      CheckReal("config.min_p", out.min_p, {.low = 0, .high = 1}));
  WEFT_RETURN_IF_ERROR(ReadPenalties(in, &out));
  WEFT_RETURN_IF_ERROR(ReadBiases(in, limits.vocab_size, &out));
  out.seed = in.has_seed() ? in.seed() : DrawSeed();
  WEFT_ASSIGN_OR_RETURN(out.stop, ReadStop(in.stop(), limits));
  WEFT_RETURN_IF_ERROR(ReadAllowed(in, limits, &out));
  return out;
}

// Checks the fields that ask for the distribution of a draw.
absl::Status CheckDistribution(const v1::SampleRequest& request,
                               const SamplingConfig& config) {
  if (config.temperature == 0) {
    for (const auto& [field, asked] :
         {std::pair("truncated_logprobs", request.truncated_logprobs()),
          std::pair("return_support", request.return_support())}) {
      if (!asked) continue;
      return BadField(field,
                      "is set with config.temperature 0, which draws from one "
                      "token: leave it out, or set a temperature above 0");
    }
  }
  // A trainer with the supports computes truncated log-probabilities, so ratios
  // to other ones would be wrong in silence. A record implies them.
  if (request.return_support() && !request.truncated_logprobs() &&
      !request.record()) {
    return BadField("return_support",
                    "is set, so truncated_logprobs must be set, too: training "
                    "with supports needs logprobs of the same distribution");
  }
  return absl::OkStatus();
}

// Checks a request with a checkpoint, whose weights never change.
absl::Status CheckCheckpoint(const v1::SampleRequest& request) {
  if (request.adapter_id().empty()) {
    return BadField("adapter_id", "is required with a checkpoint");
  }
  if (!request.snapshot().empty()) {
    return BadField("snapshot",
                    "must not be set with checkpoint: leave one of them out");
  }
  if (request.in_flight() || request.recompute_cache()) {
    return BadField(request.in_flight() ? "in_flight" : "recompute_cache",
                    "must not be set with checkpoint, whose weights never "
                    "change: leave one of them out");
  }
  return CheckName("checkpoint", request.checkpoint());
}

absl::Status CheckSource(const v1::SampleRequest& request,
                         const RequestLimits& limits) {
  if (!request.adapter_id().empty()) {
    WEFT_RETURN_IF_ERROR(CheckAdapterId("adapter_id", request.adapter_id(),
                                        limits.engine_names));
  }
  if (request.in_flight() && request.adapter_id().empty()) {
    return BadField("in_flight",
                    "needs adapter_id: the base model has no versions");
  }
  if (request.in_flight() && !request.snapshot().empty()) {
    return BadField("in_flight",
                    "must not be set with snapshot, whose weights never "
                    "change: leave one of them out");
  }
  if (!request.checkpoint().empty()) return CheckCheckpoint(request);
  if (request.recompute_cache() && !request.in_flight()) {
    return BadField("recompute_cache", "needs in_flight");
  }
  if (request.snapshot().empty()) return absl::OkStatus();
  if (request.adapter_id().empty()) {
    return BadField("adapter_id", "is required with a snapshot");
  }
  return CheckName("snapshot", request.snapshot());
}

// Reads `record`, after all other fields. The record needs experts and
// supports, and the log-probabilities that belong to the supports.
absl::Status ReadRecord(const v1::SampleRequest& in,
                        const RequestLimits& limits, SampleRequest* out) {
  if (!in.record()) return absl::OkStatus();
  if (!limits.keeps_sample_records) {
    return absl::FailedPreconditionError(
        "record is set, but this server keeps no records of samples "
        "(--sample-record-bytes is 0): ask for return_routing and "
        "return_support, and send them with the data");
  }
  if (in.recompute_cache() && limits.expert_layers > 0) {
    return BadField("record",
                    "must not be set with recompute_cache, which chooses the "
                    "experts of all tokens again with each version: leave one "
                    "of them out");
  }
  out->record = DrawRecordId();
  out->hide_routing = !out->return_routing;
  out->return_routing = limits.expert_layers > 0;
  if (!out->config.truncates()) return absl::OkStatus();
  out->hide_support = !out->return_support;
  out->return_support = true;
  out->truncated_logprobs = true;
  return absl::OkStatus();
}

// Reads prompt_targets, after `out->prompt`.
absl::Status ReadPromptTargets(const v1::PromptTargets& in, int vocab_size,
                               SampleRequest* out) {
  if (static_cast<size_t>(in.counts_size()) + 1 != out->prompt.size()) {
    return BadField("prompt_targets.counts", "has ", in.counts_size(),
                    " values, must have ", out->prompt.size() - 1,
                    ", one for each token of the prompt but the first");
  }
  out->prompt_target_offsets = {0};
  for (int i = 0; i < in.counts_size(); ++i) {
    WEFT_RETURN_IF_ERROR(
        CheckCount(absl::StrCat("prompt_targets.counts[", i, "]"), in.counts(i),
                   0, kMaxTargetsPerToken));
    out->prompt_target_offsets.push_back(out->prompt_target_offsets.back() +
                                         in.counts(i));
  }
  if (out->prompt_target_offsets.back() != in.tokens_size()) {
    return BadField("prompt_targets.tokens", "has ", in.tokens_size(),
                    " values, must have ", out->prompt_target_offsets.back(),
                    ", the sum of prompt_targets.counts");
  }
  WEFT_ASSIGN_OR_RETURN(out->prompt_targets, ReadIds("prompt_targets.tokens",
                                                     in.tokens(), vocab_size));
  return absl::OkStatus();
}

// Reads what the request wants of its prompt, after `out->prompt`.
absl::Status ReadPromptScores(const v1::SampleRequest& in, int vocab_size,
                              SampleRequest* out) {
  out->prompt_logprobs = in.prompt_logprobs();
  WEFT_RETURN_IF_ERROR(CheckCount(
      "prompt_top_logprobs", in.prompt_top_logprobs(), 0, kMaxTopLogprobs));
  out->prompt_top_logprobs = static_cast<int>(in.prompt_top_logprobs());
  WEFT_RETURN_IF_ERROR(CheckCount(
      "prompt_alternatives", in.prompt_alternatives(), 0, kMaxAlternatives));
  out->prompt_alternatives = static_cast<int>(in.prompt_alternatives());
  if (in.prompt_logprobs_last_n() != 0) {
    if (!in.prompt_logprobs() && in.prompt_top_logprobs() == 0) {
      return BadField("prompt_logprobs_last_n", "is ",
                      in.prompt_logprobs_last_n(),
                      ", is only for prompt_logprobs and "
                      "prompt_top_logprobs");
    }
    WEFT_RETURN_IF_ERROR(CheckCount("prompt_logprobs_last_n",
                                    in.prompt_logprobs_last_n(), 0,
                                    out->prompt.size() - 1));
    out->prompt_logprobs_last_n = in.prompt_logprobs_last_n();
  }
  if (!in.has_prompt_targets()) return absl::OkStatus();
  return ReadPromptTargets(in.prompt_targets(), vocab_size, out);
}

}  // namespace

absl::StatusOr<SampleRequest> Validate(const v1::SampleRequest& request,
                                       const RequestLimits& limits) {
  WEFT_RETURN_IF_ERROR(CheckSource(request, limits));
  const int prompt_length = request.prompt_size();
  if (prompt_length < 1 || prompt_length >= limits.context_length) {
    return BadField("prompt", "has ", prompt_length,
                    " values, must be in [1, context "
                    "length ",
                    limits.context_length, ")");
  }
  SampleRequest out;
  out.adapter_id = request.adapter_id();
  out.snapshot = request.snapshot();
  out.checkpoint = request.checkpoint();
  WEFT_ASSIGN_OR_RETURN(out.prompt,
                        ReadIds("prompt", request.prompt(), limits.vocab_size));
  const uint32_t num_samples =
      request.num_samples() == 0 ? 1 : request.num_samples();
  WEFT_RETURN_IF_ERROR(CheckCount("num_samples", num_samples, 1,
                                  static_cast<uint64_t>(limits.max_samples),
                                  "--max-samples"));
  out.num_samples = static_cast<int>(num_samples);
  WEFT_RETURN_IF_ERROR(
      CheckCount("top_logprobs", request.top_logprobs(), 0, kMaxTopLogprobs));
  out.top_logprobs = static_cast<int>(request.top_logprobs());
  WEFT_RETURN_IF_ERROR(ReadPromptScores(request, limits.vocab_size, &out));
  WEFT_RETURN_IF_ERROR(
      CheckRouting("return_routing", request.return_routing(), limits));
  out.return_routing = request.return_routing();
  out.in_flight = request.in_flight();
  out.recompute_cache = request.recompute_cache();
  WEFT_ASSIGN_OR_RETURN(
      out.config, ReadConfig(request.config(), out.prompt.size(), limits));
  WEFT_RETURN_IF_ERROR(CheckDistribution(request, out.config));
  out.truncated_logprobs = request.truncated_logprobs();
  out.return_support = request.return_support();
  WEFT_RETURN_IF_ERROR(ReadRecord(request, limits, &out));
  return out;
}

}  // namespace weft::server
