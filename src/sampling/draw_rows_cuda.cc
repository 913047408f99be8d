#include "src/sampling/draw_rows_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <span>
#include <utility>

#include "kernels/cuda/sampler.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"

namespace weft::sampling::cuda {
namespace {

namespace k = kernels::cuda;

// A prompt may have thousands of samples. So the workspace is for so many rules
// at most, and later rules use it again.
constexpr int64_t kRulesAtOnce = 256;

k::SampleRule RuleOf(const DrawRule& rule) {
  auto temperature = static_cast<float>(rule.config.temperature);
  if (rule.config.temperature > 0) {
    // A tiny temperature must not round to 0 in f32, because 0 means greedy.
    temperature = std::max(temperature, std::numeric_limits<float>::min());
  }
  return {.temperature = temperature,
          .top_k = rule.config.top_k,
          .top_p = rule.config.top_p,
          .seed = rule.seed,
          .sample_index = rule.sample_index,
          .position = rule.position,
          .row = rule.row,
          .min_p = static_cast<float>(rule.config.min_p)};
}

// Draws on the host for the rules with lists. Copies each row once.
class ListedDraws {
 public:
  explicit ListedDraws(const std::vector<DrawRule>& rules) {
    for (size_t i = 0; i < rules.size(); ++i) {
      if (!rules[i].config.has_lists()) continue;
      places_.push_back(i);
      rules_.push_back(rules[i]);
      rows_.push_back(rules[i].row);
    }
    std::ranges::sort(rows_);
    rows_.erase(std::unique(rows_.begin(), rows_.end()), rows_.end());
    for (DrawRule& rule : rules_) {
      const auto row = std::ranges::lower_bound(rows_, int64_t{rule.row});
      rule.row = static_cast<int32_t>(row - rows_.begin());
    }
  }

  // Returns the rows of logits that the rules with lists use, on the device.
  // Returns an undefined tensor if there are no such rules.
  at::Tensor Logits(const at::Tensor& logits_RV) const {
    if (rows_.empty()) return {};
    return logits_RV.index_select(0, ops::ToDevice(rows_, logits_RV.device()));
  }
  // Draws from `logits_LV`, a host copy of the rows that Logits returned.
  void Draw(const at::Tensor& logits_LV,
            std::vector<std::optional<DrawResult>>& drawn) const {
    if (rows_.empty()) return;
    auto own = sampling::DrawRows(logits_LV, rules_);
    for (size_t i = 0; i < own.size(); ++i) {
      drawn[places_[i]] = std::move(own[i]);
    }
  }

 private:
  std::vector<size_t> places_;
  std::vector<DrawRule> rules_;
  std::vector<int64_t> rows_;
};

// Returns the most filters of a rule, as in kernels::cuda::SampleRows.
int MaxFilters(const std::vector<DrawRule>& rules) {
  int most = 0;
  for (const DrawRule& rule : rules) {
    const DrawConfig& config = rule.config;
    if (config.temperature == 0) continue;
    most =
        std::max({most, (config.top_k > 0 ? 1 : 0) + (config.top_p < 1 ? 1 : 0),
                  config.min_p > 0 ? 1 : 0});
  }
  return most;
}

// Queues the draws. Returns [2, N] i32: tokens, then the bits of their
// log-probabilities.
at::Tensor QueueDraws(const at::Tensor& logits_RV,
                      const std::vector<DrawRule>& rules) {
  const auto num_rules = static_cast<int64_t>(rules.size());
  const int64_t vocab = logits_RV.size(1);
  const int max_filters = MaxFilters(rules);
  const at::TensorOptions options(logits_RV.device());
  std::vector<k::SampleRule> host_rules;
  host_rules.reserve(rules.size());
  std::ranges::transform(rules, std::back_inserter(host_rules), RuleOf);
  const at::Tensor rules_N =
      ops::ToDevice(std::as_bytes(std::span(host_rules)), logits_RV.device());
  at::Tensor results_2N = at::empty({2, num_rules}, options.dtype(at::kInt));
  auto* const tokens = results_2N.mutable_data_ptr<int32_t>();
  auto* const logprobs = reinterpret_cast<float*>(tokens + num_rules);
  const size_t workspace_bytes = k::SampleWorkspaceBytes(
      std::min(num_rules, kRulesAtOnce), vocab, max_filters);
  const at::Tensor workspace = at::empty(
      {static_cast<int64_t>(workspace_bytes)}, options.dtype(at::kByte));
  for (int64_t begin = 0; begin < num_rules; begin += kRulesAtOnce) {
    C10_CUDA_CHECK(k::SampleTokens(
        {.num_rules = std::min(num_rules - begin, kRulesAtOnce),
         .vocab = vocab,
         .logits_MV = logits_RV.const_data_ptr<float>(),
         .row_stride = logits_RV.stride(0),
         .rules_N =
             static_cast<const k::SampleRule*>(rules_N.const_data_ptr()) +
             begin,
         .max_filters = max_filters,
         .workspace = workspace.mutable_data_ptr(),
         .tokens_N = tokens + begin,
         .logprobs_N = logprobs + begin},
        ops::cuda::CurrentStream()));
  }
  return results_2N;
}

}  // namespace

std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules) {
  if (rules.empty()) return {};
  const ListedDraws listed(rules);
  at::Tensor results_2N = QueueDraws(logits_RV, rules);
  at::Tensor listed_LV = listed.Logits(logits_RV);
  ops::ToHost({&results_2N, &listed_LV});

  const int32_t* tokens = results_2N.const_data_ptr<int32_t>();
  const int32_t* logprobs = tokens + results_2N.size(1);
  std::vector<std::optional<DrawResult>> drawn(rules.size());
  for (size_t i = 0; i < rules.size(); ++i) {
    if (tokens[i] < 0) continue;
    drawn[i] = DrawResult{.token = tokens[i],
                          .logprob = std::bit_cast<float>(logprobs[i])};
  }
  listed.Draw(listed_LV, drawn);
  return drawn;
}

}  // namespace weft::sampling::cuda
