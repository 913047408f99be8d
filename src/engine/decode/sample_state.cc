#include "src/engine/decode/sample_state.h"

#include <algorithm>

#include "src/engine/decode/kv_pool.h"

namespace weft::engine {

sampling::DrawRule SampleJob::RuleOf(int sample_index, int64_t row) const {
  const SamplingConfig& config = request->config;
  return {.config = {.temperature = config.temperature,
                     .top_k = request->draw_top_k(),
                     .top_p = config.top_p,
                     .min_p = config.min_p,
                     .top_logprobs = request->top_logprobs,
                     .truncated_logprobs = request->truncated_logprobs,
                     .support = request->has_support()},
          .seed = config.seed,
          .sample_index = static_cast<uint32_t>(sample_index),
          .position =
              static_cast<uint32_t>(result.samples[sample_index].tokens.size()),
          .row = static_cast<int32_t>(row)};
}

void SampleJob::MakeEdits(int64_t vocab, at::Device device) {
  edits = sampling::SharedEdits(request->config, request->prompt,
                                stop.token_ids, vocab, device);
}

int64_t SampleSequence::target() const {
  const auto prompt = static_cast<int64_t>(job->request->prompt.size());
  if (sample_index == kPrompt) return prompt;
  const Sample& sample = job->result.samples[sample_index];
  return prompt + static_cast<int64_t>(sample.tokens.size()) - 1;
}

bool SampleSequence::may_take_version() const {
  if (sample_index == kPrompt) {
    const bool is_half_scored = job->first_draws.empty() &&
                                job->num_scored > job->request->first_scored();
    return !pages.has_value() && !is_half_scored;
  }
  if (!pages.has_value()) return true;
  // If new versions came faster than prefill, a sample whose keys are computed
  // again for each would draw nothing.
  return ready() &&
         (!job->request->recompute_cache ||
          job->result.samples[sample_index].version_spans.back().version ==
              version->number);
}

int64_t SampleSequence::first_listed() const {
  const SampleRequest& request = *job->request;
  if (sample_index != kPrompt || !job->first_draws.empty()) return target();
  if (request.prompt_alternatives > 0) return 0;
  return request.prompt_top_logprobs > 0 ? request.first_of_last_n() - 1
                                         : target();
}

std::array<int64_t, 2> SampleSequence::StatePlaces() const {
  if (sample_index != kPrompt) return {};
  // The last token of a prompt is always computed (SampleSequences::TakePages),
  // so an equal prompt begins before it.
  return {fork_tokens, (target() - 1) / kPageTokens * kPageTokens};
}

std::vector<int32_t> SampleSequence::Tokens(int64_t count) const {
  const std::vector<int32_t>& prompt = job->request->prompt;
  const auto from_prompt = std::min(count, static_cast<int64_t>(prompt.size()));
  std::vector<int32_t> tokens(prompt.begin(), prompt.begin() + from_prompt);
  if (count > from_prompt) {
    const std::vector<int32_t>& drawn =
        job->result.samples[sample_index].tokens;
    tokens.insert(tokens.end(), drawn.begin(),
                  drawn.begin() + (count - from_prompt));
  }
  return tokens;
}

void SampleSequence::AddEdits(int64_t row,
                              std::vector<sampling::RowEdits>& rows) {
  const size_t drawn = sample_index == kPrompt
                           ? 0
                           : job->result.samples[sample_index].tokens.size();
  const bool early =
      drawn < static_cast<size_t>(job->request->config.min_tokens);
  if (edits.IsEmpty(early)) return;
  rows.push_back({.row = row, .edits = &edits, .early = early});
}

}  // namespace weft::engine
