// Converts the result of asample to Tinker's message (sample_wire.h).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "server/tinker/errors.h"
#include "server/tinker/sample_wire.h"
#include "server/tinker/wire.pb.h"

namespace weft::tinker {
namespace {

// The SDK reads this log-probability as an empty cell.
constexpr float kEmptyCell = -99999.0F;

template <typename T>
void SetRaw(const std::vector<T>& values, std::string* out) {
  out->assign(reinterpret_cast<const char*>(values.data()),
              values.size() * sizeof(T));
}

template <typename T>
std::vector<T> GetRaw(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) {
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  }
  return values;
}

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
  SetRaw(ids, out->mutable_token_ids());
  SetRaw(logprobs, out->mutable_logprobs());
  out->set_k(static_cast<uint32_t>(width));
  out->set_length(static_cast<uint32_t>(rows.size()));
}

// Converts raw log-probabilities to JSON. A NaN becomes null, because JSON has
// no NaN.
Json LogprobsJson(const std::string& raw) {
  Json out = Json::array();
  for (const float value : GetRaw<float>(raw)) {
    out.push_back(std::isnan(value) ? Json() : Json(value));
  }
  return out;
}

// Converts a table to JSON as the SDK does. A row becomes the list of the pairs
// (token, logprob) before its first empty cell. An empty list becomes null.
Json TopJson(const TopkLogprobs& top) {
  const auto ids = GetRaw<int32_t>(top.token_ids());
  const auto logprobs = GetRaw<float>(top.logprobs());
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

}  // namespace

std::string SampleOutput(const SampleResult& result,
                         const SampleFormat& format) {
  SampleResponse out;
  for (const Sample& sample : result.samples) {
    SampledSequence* const sequence = out.add_sequences();
    sequence->set_stop_reason(sample.finish_reason == FinishReason::kStop
                                  ? STOP_REASON_STOP
                                  : STOP_REASON_LENGTH);
    SetRaw(sample.tokens, sequence->mutable_tokens());
    SetRaw(sample.logprobs, sequence->mutable_logprobs());
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
    SetRaw(logprobs, out.mutable_prompt_logprobs());
  }
  if (format.prompt_top > 0) {
    std::vector<weft::TopLogprobs> top = result.prompt_top_logprobs;
    std::fill_n(top.begin(), unscored(top.size()), weft::TopLogprobs());
    FillTop(top, static_cast<size_t>(format.prompt_top),
            out.mutable_topk_prompt_logprobs());
  }
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
        {"tokens", GetRaw<int32_t>(sequence.tokens())},
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
  return JsonReply(reply).body;
}

}  // namespace weft::tinker
