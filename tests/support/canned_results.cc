#include "tests/support/canned_results.h"

#include <utility>

namespace weft {
namespace {

constexpr float kTokenLogprob = -0.25F;

}  // namespace

EngineInfo CannedInfo() {
  return {.device = "cpu",
          .dtype = "f32",
          .architecture = "canned",
          .num_layers = 2,
          .hidden_size = 8,
          .vocab_size = 100,
          .context_length = 32,
          .eos_token_ids = {2},
          .num_parameters = 12345,
          .max_adapters = 4,
          .max_adapters_per_tenant = 3,
          .max_adapter_bytes_per_tenant = 1 << 30,
          .max_rank = 64,
          .replay_window = 64,
          .has_byte_decoder = false,
          .keeps_sample_records = true};
}

TrainResult CannedTrain(const TrainRequest& request, uint64_t step) {
  TrainResult result;
  double sum = 0;
  for (const Datum& datum : request.data) {
    DatumResult& out = result.data.emplace_back();
    out.targets_per_token = datum.targets_per_token;
    for (size_t i = 0; i < datum.targets.size(); ++i) {
      const float weight = datum.weights.empty() ? 1.0F : datum.weights[i];
      const float logprob = weight == 0 && !request.loss.score_all
                                ? 0.0F
                                : -static_cast<float>(datum.targets[i] + 1) / 8;
      out.logprobs.push_back(logprob);
      out.losses.push_back(-weight * logprob);
      sum += out.losses.back();
    }
    if (request.loss.return_entropy) {
      out.entropies.assign(datum.tokens.size(), 0.5F);
    }
  }
  result.metrics["loss:sum"] = sum;
  result.step = step;
  return result;
}

std::vector<float> CannedPromptLogprobs(const SampleRequest& request) {
  if (!request.prompt_logprobs) return {};
  std::vector<float> logprobs(request.prompt.size(), -1.0F);
  logprobs.front() = 0;
  return logprobs;
}

std::vector<TopLogprobs> CannedPromptTop(const SampleRequest& request) {
  if (request.prompt_top_logprobs == 0) return {};
  std::vector<TopLogprobs> rows(1);
  for (size_t i = 1; i < request.prompt.size(); ++i) {
    rows.emplace_back(request.prompt_top_logprobs,
                      std::pair(request.prompt[i], -1.0F));
  }
  return rows;
}

void FillCannedPrompt(const SampleRequest& request, SampleResult* result) {
  result->prompt_target_logprobs.assign(request.prompt_targets.size(), -0.5F);
  result->prompt_cached_tokens = 1;
  if (request.prompt_alternatives == 0) return;
  result->prompt_alternatives.resize(1);
  for (size_t i = 1; i < request.prompt.size(); ++i) {
    result->prompt_alternatives.emplace_back(
        request.prompt_alternatives, std::pair(request.prompt[i], -0.75F));
  }
}

Sample CannedToken(const SampleRequest& request, int vocab_size,
                   int sample_index, int position) {
  const int32_t token =
      (request.prompt.back() + 1 + sample_index + position) % vocab_size;
  Sample piece{.tokens = {token}, .logprobs = {kTokenLogprob}};
  if (request.top_logprobs > 0) {
    piece.top_logprobs.emplace_back(request.top_logprobs,
                                    std::pair(token, kTokenLogprob));
  }
  if (request.in_flight) {
    piece.version_spans = {
        {.version = position == 0 ? 1ULL : 2ULL, .tokens = 1}};
  }
  if (position + 1 == request.config.max_tokens) {
    piece.finish_reason = FinishReason::kLength;
  }
  return piece;
}

}  // namespace weft
