#include "server/tinker/wire/sample_wire.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/http/replies.h"
#include "server/tinker/wire.pb.h"
#include "server/tinker/wire/fields.h"
#include "server/tinker/wire/tensor.h"
#include "server/wire/field_checks.h"
#include "server/wire/request_validation.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

absl::Status ReadStop(const Json& params, v1::SamplingConfig* out) {
  const Json* const stop = Find(params, "stop");
  // Without `stop`, the model's end-of-sequence tokens stop a sample. With
  // `stop`, only the entries of `stop` do.
  if (stop == nullptr) return absl::OkStatus();
  v1::StopRule* const rule = out->mutable_stop();
  rule->set_ignore_eos(true);
  if (stop->is_string()) {
    rule->add_byte_strings(stop->get<std::string>());
    return absl::OkStatus();
  }
  if (!stop->is_array()) return BadField("stop", "must be a text or a list");
  for (const Json& entry : *stop) {
    if (entry.is_string()) {
      rule->add_byte_strings(entry.get<std::string>());
      continue;
    }
    WEFT_ASSIGN_OR_RETURN(const auto id,
                          Int32List(Json::array({entry}), "stop"));
    rule->add_token_ids(static_cast<uint32_t>(id[0]));
  }
  return absl::OkStatus();
}

absl::Status ReadParams(const Json& params, v1::SamplingConfig* out) {
  WEFT_ASSIGN_OR_RETURN(const uint32_t max_tokens,
                        Count(params, "max_tokens", kAllThatFit));
  out->set_max_tokens(max_tokens);
  WEFT_ASSIGN_OR_RETURN(const auto temperature, Number(params, "temperature"));
  if (temperature) out->set_temperature(*temperature);
  WEFT_ASSIGN_OR_RETURN(const auto top_p, Number(params, "top_p"));
  if (top_p) out->set_top_p(*top_p);
  WEFT_ASSIGN_OR_RETURN(const int64_t top_k, Int(params, "top_k", -1));
  if (top_k < -1 || top_k > 1'000'000'000) {
    return BadField("top_k", "must be -1 or the number of tokens to draw from");
  }
  out->set_top_k(static_cast<uint32_t>(std::max<int64_t>(0, top_k)));
  const Json* const seed = Find(params, "seed");
  if (seed != nullptr) {
    if (!seed->is_number_integer()) {
      return BadField("seed", "must be a whole number");
    }
    out->set_seed(seed->get<uint64_t>());
  }
  return ReadStop(params, out);
}

constexpr char kPromptTargets[] = "target_prompt_logprobs";
// The value of a cell that asks for nothing.
constexpr int64_t kNoTarget = -1;

// Reads `target_prompt_logprobs` of the body, int64 [P - 1, K], dense or CSR.
// Returns the tensor, and sets *out, which has the prompt, to what the cells
// ask for. An absent field returns a tensor without a dtype and leaves *out
// unchanged.
absl::StatusOr<Tensor> ReadTargets(const Json& body, v1::SampleRequest* out) {
  const Json* const json = Find(body, kPromptTargets);
  if (json == nullptr) return Tensor();
  WEFT_ASSIGN_OR_RETURN(Tensor tensor, TensorFromJson(kPromptTargets, *json));
  if (tensor.dtype() != DTYPE_INT64) {
    return BadField(absl::StrCat(kPromptTargets, ".dtype"), "must be int64");
  }
  const int rows = out->prompt_size() - 1;
  if (tensor.shape_size() != 2 || tensor.shape(0) != rows) {
    return BadField(absl::StrCat(kPromptTargets, ".shape"),
                    absl::StrCat("must be [", rows,
                                 ", K], with a row for each token of "
                                 "the prompt but the first"));
  }
  WEFT_ASSIGN_OR_RETURN(const StoredCells cells,
                        ReadCells(kPromptTargets, tensor));
  v1::PromptTargets* const targets = out->mutable_prompt_targets();
  for (size_t row = 0; row + 1 < cells.row_offsets.size(); ++row) {
    uint32_t count = 0;
    for (int64_t i = cells.row_offsets[row]; i < cells.row_offsets[row + 1];
         ++i) {
      const int64_t token = cells.values[static_cast<size_t>(i)];
      if (token == kNoTarget) continue;
      if (!std::in_range<int32_t>(token)) {
        return BadField(
            kPromptTargets,
            absl::StrCat("has ", token, ", must have ids of tokens or ",
                         kNoTarget));
      }
      targets->add_tokens(static_cast<uint32_t>(token));
      ++count;
    }
    targets->add_counts(count);
  }
  return tensor;
}

// Reads what the body asks of its prompt.
absl::Status ReadPromptScores(const Json& body, TranslatedSample* out) {
  v1::SampleRequest& request = out->request;
  WEFT_ASSIGN_OR_RETURN(const bool logprobs,
                        Bool(body, "prompt_logprobs", false));
  request.set_prompt_logprobs(logprobs);
  WEFT_ASSIGN_OR_RETURN(const uint32_t top,
                        Count(body, "topk_prompt_logprobs", 0, 0));
  request.set_prompt_top_logprobs(top);
  out->format.prompt_top = top;
  WEFT_ASSIGN_OR_RETURN(const uint32_t last_n,
                        Count(body, "prompt_logprobs_last_n", 0));
  request.set_prompt_logprobs_last_n(last_n);
  out->format.last_n = last_n == 0 ? request.prompt_size() : last_n;
  WEFT_ASSIGN_OR_RETURN(const uint32_t alternatives,
                        Count(body, "prompt_alt_tokens_k", 0, 0));
  request.set_prompt_alternatives(alternatives);
  out->format.alternatives = alternatives;
  WEFT_ASSIGN_OR_RETURN(out->format.targets, ReadTargets(body, &request));
  return absl::OkStatus();
}

// The SDK reads this log-probability as an empty cell.
constexpr float kEmptyCell = -99999.0F;

// Writes `rows` as a table. It has as many columns as the longest row, and at
// least `width`. Fills shorter rows with empty cells.
void FillTop(const std::vector<weft::TopLogprobs>& rows, size_t width,
             TopkLogprobs* out) {
  for (const auto& row : rows) width = std::max(width, row.size());
  std::vector<int32_t> ids(rows.size() * width, 0);
  std::vector<float> logprobs(rows.size() * width, kEmptyCell);
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows[i].size(); ++j) {
      ids[i * width + j] = rows[i][j].first;
      logprobs[i * width + j] = rows[i][j].second;
    }
  }
  out->set_token_ids(ToRaw(ids));
  out->set_logprobs(ToRaw(logprobs));
  out->set_k(static_cast<uint32_t>(width));
  out->set_length(static_cast<uint32_t>(rows.size()));
}

// Converts raw log-probabilities to JSON. A NaN becomes null, because JSON has
// no NaN.
Json LogprobsJson(const std::string& raw) {
  Json out = Json::array();
  for (const float value : FromRaw<float>(raw)) {
    out.push_back(std::isnan(value) ? Json() : Json(value));
  }
  return out;
}

// Converts a table to JSON as the SDK does. A row becomes the list of the pairs
// (token, logprob) before its first empty cell. An empty list becomes null.
Json TopJson(const TopkLogprobs& top) {
  const auto ids = FromRaw<int32_t>(top.token_ids());
  const auto logprobs = FromRaw<float>(top.logprobs());
  Json rows = Json::array();
  for (size_t row = 0; row < top.length(); ++row) {
    Json pairs = Json::array();
    for (size_t i = row * top.k(); i < (row + 1) * top.k(); ++i) {
      if (logprobs[i] == kEmptyCell) break;
      pairs.push_back({ids[i], logprobs[i]});
    }
    rows.push_back(pairs.empty() ? Json() : std::move(pairs));
  }
  return rows;
}

// Returns the tensor `asked` with the log-probabilities in place of the tokens,
// and 0 in place of -1. `logprobs` are those of the tokens, in their order.
Tensor ScoredTargets(Tensor asked, const std::vector<float>& logprobs) {
  std::string& raw = asked.has_sparse_csr()
                         ? *asked.mutable_sparse_csr()->mutable_values()
                         : *asked.mutable_dense();
  const auto tokens = FromRaw<int64_t>(raw);
  std::vector<float> out(tokens.size(), 0);
  auto next = logprobs.begin();
  for (size_t i = 0; i < out.size() && next != logprobs.end(); ++i) {
    if (tokens[i] != kNoTarget) out[i] = *next++;
  }
  raw = ToRaw(out);
  asked.set_dtype(DTYPE_FLOAT32);
  return asked;
}

// Converts SampleResult::prompt_alternatives with `width` draws in each entry
// but the first.
PromptAltTokens AltTokens(const std::vector<weft::TopLogprobs>& draws,
                          int64_t width) {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  for (const weft::TopLogprobs& row : draws) {
    for (const auto& [token, logprob] : row) {
      tokens.push_back(token);
      logprobs.push_back(logprob);
    }
  }
  PromptAltTokens out;
  out.mutable_tokens()->set_dtype(DTYPE_INT32);
  out.mutable_tokens()->set_dense(ToRaw(tokens));
  out.mutable_logprobs()->set_dtype(DTYPE_FLOAT32);
  out.mutable_logprobs()->set_dense(ToRaw(logprobs));
  const auto rows = static_cast<int64_t>(draws.size());
  for (Tensor* const tensor : {out.mutable_tokens(), out.mutable_logprobs()}) {
    tensor->add_shape(std::max<int64_t>(rows - 1, 0));
    tensor->add_shape(width);
  }
  return out;
}

}  // namespace

absl::StatusOr<TranslatedSample> TranslateSample(const Json& body) {
  TranslatedSample out;
  WEFT_ASSIGN_OR_RETURN(const std::vector<int32_t> prompt,
                        ReadModelInput(body, "prompt"));
  if (prompt.empty()) {
    return BadField("prompt", "is empty, must have at least one token");
  }
  out.request.mutable_prompt()->Add(prompt.begin(), prompt.end());
  WEFT_ASSIGN_OR_RETURN(const uint32_t num_samples,
                        Count(body, "num_samples", 1));
  out.request.set_num_samples(num_samples);
  WEFT_ASSIGN_OR_RETURN(const uint32_t top,
                        Count(body, "topk_sample_logprobs", 0, 0));
  out.request.set_top_logprobs(top);
  WEFT_ASSIGN_OR_RETURN(const bool record, Bool(body, kStabilityInfo, false));
  out.request.set_record(record);
  WEFT_RETURN_IF_ERROR(ReadPromptScores(body, &out));
  WEFT_ASSIGN_OR_RETURN(const Json* const params,
                        Object(body, "sampling_params"));
  WEFT_RETURN_IF_ERROR(ReadParams(*params, out.request.mutable_config()));
  return out;
}

std::string SampleOutput(const SampleResult& result,
                         const SampleFormat& format) {
  SampleResponse out;
  for (const Sample& sample : result.samples) {
    SampledSequence* const sequence = out.add_sequences();
    sequence->set_stop_reason(sample.finish_reason == FinishReason::kStop
                                  ? STOP_REASON_STOP
                                  : STOP_REASON_LENGTH);
    sequence->set_tokens(ToRaw(sample.tokens));
    sequence->set_logprobs(ToRaw(sample.logprobs));
    if (!sample.top_logprobs.empty()) {
      FillTop(sample.top_logprobs, 0,
              sequence->mutable_topk_sampled_logprobs());
    }
  }
  // Returns how many tokens at the start of the prompt get no score. The first
  // token never gets a score, because nothing predicts it.
  const auto unscored = [&format](size_t size) {
    const auto count = static_cast<int64_t>(size);
    return std::min(count, std::max<int64_t>(1, count - format.last_n));
  };
  if (!result.prompt_logprobs.empty()) {
    std::vector<float> logprobs = result.prompt_logprobs;
    std::fill_n(logprobs.begin(), unscored(logprobs.size()),
                std::numeric_limits<float>::quiet_NaN());
    out.set_prompt_logprobs(ToRaw(logprobs));
  }
  if (format.prompt_top > 0) {
    std::vector<weft::TopLogprobs> top = result.prompt_top_logprobs;
    std::fill_n(top.begin(), unscored(top.size()), weft::TopLogprobs());
    FillTop(top, static_cast<size_t>(format.prompt_top),
            out.mutable_topk_prompt_logprobs());
  }
  if (format.targets.dtype() != DTYPE_UNSPECIFIED) {
    *out.mutable_target_prompt_logprobs() =
        ScoredTargets(format.targets, result.prompt_target_logprobs);
  }
  if (format.alternatives > 0) {
    *out.mutable_prompt_alt_tokens() =
        AltTokens(result.prompt_alternatives, format.alternatives);
  }
  out.set_prompt_cache_hit_tokens(
      static_cast<int32_t>(result.prompt_cached_tokens));
  return out.SerializeAsString();
}

std::string SampleOutputJson(const std::string& serialized) {
  SampleResponse output;
  output.ParseFromString(serialized);
  Json sequences = Json::array();
  for (const SampledSequence& sequence : output.sequences()) {
    Json entry = {
        {"stop_reason",
         sequence.stop_reason() == STOP_REASON_STOP ? "stop" : "length"},
        {"tokens", FromRaw<int32_t>(sequence.tokens())},
        {"logprobs", LogprobsJson(sequence.logprobs())}};
    if (sequence.has_topk_sampled_logprobs()) {
      entry["topk_logprobs"] = TopJson(sequence.topk_sampled_logprobs());
    }
    sequences.push_back(std::move(entry));
  }
  Json reply = {{"type", "sample"}, {"sequences", std::move(sequences)}};
  if (output.has_prompt_logprobs()) {
    reply["prompt_logprobs"] = LogprobsJson(output.prompt_logprobs());
  }
  if (output.has_topk_prompt_logprobs()) {
    reply["topk_prompt_logprobs"] = TopJson(output.topk_prompt_logprobs());
  }
  if (output.has_target_prompt_logprobs()) {
    reply["target_prompt_logprobs"] =
        TensorToJson(output.target_prompt_logprobs());
  }
  if (output.has_prompt_alt_tokens()) {
    reply["prompt_alt_tokens"] = {
        {"tokens", TensorToJson(output.prompt_alt_tokens().tokens())},
        {"logprobs", TensorToJson(output.prompt_alt_tokens().logprobs())}};
  }
  reply["prompt_cache_hit_tokens"] = output.prompt_cache_hit_tokens();
  return JsonReply(reply).body;
}

}  // namespace weft::server::tinker
