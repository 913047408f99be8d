#include "tests/server/wire/accepted.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"

namespace weft::server {
namespace {

// Repeats the rule from the proto, and does not use the code under test.
bool IsPlainName(absl::string_view name) {
  return !name.empty() && name.size() <= 128 && absl::ascii_isalnum(name[0]) &&
         name.back() != '.' && std::ranges::all_of(name, [](unsigned char c) {
           return absl::ascii_isalnum(c) || c == '.' || c == '_' || c == '-';
         });
}

void ExpectNameOrNone(const std::string& name) {
  if (!name.empty()) ExpectName(name);
}

void ExpectIds(const std::vector<int32_t>& ids, const RequestLimits& limits) {
  for (const int32_t id : ids) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, limits.vocab_size);
  }
}

void ExpectFinite(const std::vector<float>& values) {
  for (const float value : values) EXPECT_TRUE(std::isfinite(value)) << value;
}

// `recorded` says whether records have the logprobs that are absent.
void ExpectUsable(const Datum& datum, LossFunction function, bool recorded,
                  const RequestLimits& limits) {
  const int64_t tokens = datum.num_tokens();
  EXPECT_GE(tokens, 1);
  EXPECT_LE(tokens, limits.context_length);
  ExpectIds(datum.tokens, limits);
  ExpectIds(datum.targets, limits);
  int64_t end = 0;
  for (int64_t i = 0; i < tokens; ++i) {
    const TargetSpan span = datum.targets_of(i);
    EXPECT_EQ(span.begin, end);
    EXPECT_GE(span.end, span.begin);
    end = span.end;
  }
  ASSERT_EQ(end, static_cast<int64_t>(datum.targets.size()));
  if (!datum.weights.empty()) {
    EXPECT_EQ(datum.weights.size(), datum.targets.size());
  }
  ExpectFinite(datum.weights);
  EXPECT_EQ(datum.routing.size() % datum.tokens.size(), 0);
  for (const uint16_t expert : datum.routing) {
    EXPECT_LT(expert, limits.num_experts);
  }
  ExpectIds(datum.support.tokens, limits);
  if (!datum.support.offsets.empty()) {
    EXPECT_EQ(datum.targets.size(), datum.tokens.size());
    ASSERT_EQ(datum.support.offsets.size(), datum.tokens.size() + 1);
    EXPECT_EQ(datum.support.offsets.back(), datum.support.tokens.size());
    for (size_t i = 0; i < datum.targets.size(); ++i) {
      const auto first =
          datum.support.tokens.begin() + datum.support.offsets[i];
      const auto last =
          datum.support.tokens.begin() + datum.support.offsets[i + 1];
      const std::set<int32_t> ids(first, last);
      EXPECT_TRUE(std::equal(ids.begin(), ids.end(), first, last));
      EXPECT_TRUE(ids.empty() || ids.contains(datum.targets[i]));
    }
  }
  for (const auto& [name, input] : datum.custom_inputs) {
    int64_t values = 1;
    for (const int64_t size : input.shape) values *= size;
    EXPECT_EQ(input.is_int ? input.ints.size() : input.floats.size(), values);
  }
  if (function == LossFunction::kCustom) {
    EXPECT_TRUE(datum.weights.empty());
    return;
  }
  EXPECT_TRUE(datum.custom_inputs.empty());
  if (function == LossFunction::kCrossEntropy) return;
  EXPECT_EQ(datum.targets.size(), datum.tokens.size());
  if (HasTeacher(function)) {
    ExpectIds(datum.teacher_tokens, limits);
    for (int64_t i = 0; i < tokens; ++i) {
      if (!datum.weights.empty() && datum.weights[i] == 0) continue;
      EXPECT_GE(i + datum.teacher_offset, 0);
      EXPECT_LT(i + datum.teacher_offset,
                static_cast<int64_t>(datum.teacher_input().size()));
    }
    return;
  }
  if (!recorded || !datum.logprobs.empty()) {
    EXPECT_EQ(datum.logprobs.size(), datum.targets.size());
  }
  EXPECT_EQ(datum.advantages.size(), datum.targets.size());
  ExpectFinite(datum.logprobs);
  ExpectFinite(datum.advantages);
  for (const float value : datum.logprobs) EXPECT_LE(value, 0);
}

void ExpectUsable(const LossConfig& loss) {
  for (const double value : {loss.clip_low, loss.clip_high, loss.beta}) {
    EXPECT_TRUE(std::isfinite(value) && value >= 0) << value;
  }
  EXPECT_LE(loss.clip_low, loss.clip_high);
  EXPECT_TRUE(std::isfinite(static_cast<float>(1 / loss.temperature)));
  EXPECT_GT(loss.temperature, 0);
  EXPECT_TRUE(loss.gradient_filter >= 0 && loss.gradient_filter < 1);
  if (HasTeacher(loss.function)) {
    EXPECT_NE(loss.teacher.base_model, !loss.teacher.adapter_id.empty());
    EXPECT_TRUE(loss.gradient_filter == 0 && !loss.score_all);
    EXPECT_TRUE(loss.function != LossFunction::kJs ||
                (loss.beta > 0 && loss.beta < 1));
  }
}

void ExpectUsable(const StopRule& stop, const RequestLimits& limits) {
  ExpectIds(stop.token_ids, limits);
  for (const std::vector<int32_t>& sequence : stop.token_sequences) {
    EXPECT_FALSE(sequence.empty());
    ExpectIds(sequence, limits);
  }
  for (const std::string& bytes : stop.byte_strings) EXPECT_NE(bytes, "");
  EXPECT_LE(stop.token_ids.size() + stop.token_sequences.size() +
                stop.byte_strings.size(),
            kMaxStopEntries);
}

void ExpectUsable(const std::vector<SampledSpan>& spans, const Datum& datum) {
  uint64_t free = 0;
  for (const SampledSpan& span : spans) {
    EXPECT_NE(span.sequence_id, "");
    EXPECT_GE(span.start, free);
    EXPECT_GE(span.length, 1);
    free = uint64_t{span.start} + span.length;
    EXPECT_LE(free, datum.targets.size());
    EXPECT_EQ(datum.targets.size(), datum.tokens.size());
  }
}

}  // namespace

void ExpectName(const std::string& name) {
  EXPECT_TRUE(IsPlainName(name)) << name;
}

void ExpectId(const std::string& id) {
  const std::vector<std::string> parts = absl::StrSplit(id, '~');
  EXPECT_LE(parts.size(), 2) << id;
  for (const std::string& part : parts) ExpectName(part);
}

void ExpectFiles(const PeftFiles& files) {
  std::set<std::string> names;
  for (const auto& [name, bytes] : files) {
    ExpectName(name);
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(names.count("adapter_config.json"), 1);
}

void ExpectUsable(const TrainRequest& request, const RequestLimits& limits) {
  if (!request.adapter_id.empty()) ExpectId(request.adapter_id);
  EXPECT_TRUE(!request.backward || !request.adapter_id.empty());
  EXPECT_TRUE(!request.unnumbered || request.step == 0);
  EXPECT_TRUE(request.snapshot.empty() || request.unnumbered);
  ExpectNameOrNone(request.snapshot);
  ExpectUsable(request.loss);
  EXPECT_GE(request.data.size(), 1);
  EXPECT_LE(request.data.size(), static_cast<size_t>(limits.max_data));
  EXPECT_LE(request.num_tokens(), limits.max_tokens);
  const Replay& replay = request.replay;
  EXPECT_TRUE(replay.spans.empty() ||
              replay.spans.size() == request.data.size());
  EXPECT_NE(replay.routing || replay.support || replay.logprobs,
            replay.spans.empty());
  for (size_t i = 0; i < request.data.size(); ++i) {
    const bool has_spans = !replay.spans.empty() && !replay.spans[i].empty();
    ExpectUsable(request.data[i], request.loss.function,
                 has_spans && replay.logprobs, limits);
    if (has_spans) ExpectUsable(replay.spans[i], request.data[i]);
  }
}

void ExpectUsable(const OptimStepRequest& request,
                  const RequestLimits& /*limits*/) {
  ExpectId(request.adapter_id);
  if (request.muon) {
    const MuonConfig& muon = *request.muon;
    for (const double value :
         {muon.learning_rate, muon.weight_decay, muon.max_grad_norm}) {
      EXPECT_TRUE(std::isfinite(static_cast<float>(value)) && value >= 0);
    }
    EXPECT_TRUE(muon.momentum >= 0 && muon.momentum < 1) << muon.momentum;
    EXPECT_TRUE(muon.ns_steps >= 1 && muon.ns_steps <= 10) << muon.ns_steps;
  }
  const AdamWConfig& adamw = request.adamw;
  for (const double value :
       {adamw.learning_rate, adamw.weight_decay, adamw.max_grad_norm}) {
    EXPECT_TRUE(std::isfinite(static_cast<float>(value)) && value >= 0)
        << value;
  }
  for (const double beta : {adamw.beta1, adamw.beta2}) {
    EXPECT_TRUE(beta >= 0 && beta < 1) << beta;
  }
  EXPECT_TRUE(std::isnormal(static_cast<float>(adamw.eps)) && adamw.eps > 0);
}

void ExpectUsable(const SampleRequest& request, const RequestLimits& limits) {
  if (!request.adapter_id.empty()) ExpectId(request.adapter_id);
  EXPECT_TRUE(request.snapshot.empty() || !request.adapter_id.empty());
  ExpectNameOrNone(request.snapshot);
  EXPECT_TRUE(!request.in_flight ||
              (!request.adapter_id.empty() && request.snapshot.empty()));
  EXPECT_TRUE(request.in_flight || !request.recompute_cache);
  ExpectIds(request.prompt, limits);
  const SamplingConfig& config = request.config;
  EXPECT_GE(request.prompt.size(), 1);
  EXPECT_GE(config.max_tokens, 1);
  EXPECT_LE(static_cast<int64_t>(request.prompt.size()) + config.max_tokens,
            limits.context_length);
  EXPECT_TRUE(request.num_samples >= 1 &&
              request.num_samples <= limits.max_samples);
  EXPECT_TRUE(request.top_logprobs >= 0 && request.top_logprobs <= 1024);
  EXPECT_TRUE(request.prompt_top_logprobs >= 0 &&
              request.prompt_top_logprobs <= 1024);
  EXPECT_TRUE(request.prompt_alternatives >= 0 &&
              request.prompt_alternatives <= 64);
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  EXPECT_TRUE(request.prompt_logprobs_last_n >= 0 &&
              request.prompt_logprobs_last_n < prompt);
  ExpectIds(request.prompt_targets, limits);
  const std::vector<int64_t>& offsets = request.prompt_target_offsets;
  if (!offsets.empty()) {
    EXPECT_EQ(static_cast<int64_t>(offsets.size()), prompt);
    EXPECT_EQ(offsets.front(), 0);
    EXPECT_TRUE(std::is_sorted(offsets.begin(), offsets.end()));
    EXPECT_EQ(static_cast<size_t>(offsets.back()),
              request.prompt_targets.size());
  }
  EXPECT_TRUE(config.top_k >= 0 && config.top_k <= limits.vocab_size);
  EXPECT_TRUE(config.top_p > 0 && config.top_p <= 1) << config.top_p;
  EXPECT_TRUE(config.temperature == 0 ||
              std::isnormal(static_cast<float>(1 / config.temperature)))
      << config.temperature;
  EXPECT_GE(config.temperature, 0);
  EXPECT_TRUE(!request.return_support || request.truncated_logprobs);
  EXPECT_TRUE(!request.truncated_logprobs || config.temperature > 0);
  EXPECT_TRUE(config.min_p >= 0 && config.min_p <= 1) << config.min_p;
  EXPECT_TRUE(config.repetition_penalty >= 0.01F &&
              config.repetition_penalty <= 100)
      << config.repetition_penalty;
  for (const float penalty :
       {config.presence_penalty, config.frequency_penalty}) {
    EXPECT_TRUE(penalty >= -2 && penalty <= 2) << penalty;
  }
  for (const auto& [token, bias] : config.logit_bias) {
    ExpectIds({token}, limits);
    EXPECT_TRUE(bias >= -100 && bias <= 100) << bias;
  }
  ExpectIds(config.allowed_token_ids, limits);
  EXPECT_TRUE(config.min_tokens >= 0 && config.min_tokens <= config.max_tokens);
  ExpectUsable(config.stop, limits);
}

void ExpectUsable(const CreateAdapterRequest& request,
                  const RequestLimits& limits) {
  ExpectId(request.adapter_id);
  ExpectNameOrNone(request.tenant);
  const LoraConfig& config = request.config;
  EXPECT_TRUE(config.rank >= 1 && config.rank <= limits.max_rank);
  EXPECT_TRUE(std::isfinite(config.alpha) && config.alpha > 0);
  const std::set<TargetModule> modules(config.target_modules.begin(),
                                       config.target_modules.end());
  EXPECT_FALSE(modules.empty());
  EXPECT_EQ(modules.size(), config.target_modules.size());
}

void ExpectUsable(const ListAdaptersRequest& request,
                  const RequestLimits& /*limits*/) {
  EXPECT_TRUE(request.size >= 1 && request.size <= 1000) << request.size;
  if (!request.after.empty()) ExpectId(request.after);
}

void ExpectUsable(const ProfileRequest& request,
                  const RequestLimits& /*limits*/) {
  EXPECT_GE(request.steps, 0);
  EXPECT_LE(request.steps, 100000);
  EXPECT_GT(request.duration, absl::ZeroDuration());
  EXPECT_LE(request.duration, absl::Seconds(300));
}

void ExpectUsable(const std::string& adapter_id,
                  const RequestLimits& /*limits*/) {
  if (!adapter_id.empty()) ExpectId(adapter_id);
}

void ExpectUsable(const std::pair<std::string, std::string>& names,
                  const RequestLimits& /*limits*/) {
  ExpectId(names.first);
  ExpectName(names.second);
}

}  // namespace weft::server
