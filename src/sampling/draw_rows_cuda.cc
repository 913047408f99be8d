#include "src/sampling/draw_rows_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "kernels/cuda/sampler.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"

namespace weft::sampling::cuda {
namespace {

namespace k = kernels::cuda;

constexpr size_t kRulesAtOnce = 256;

static_assert(sizeof(k::SampleRule) == kRuleBytes);

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

}  // namespace

void PutRules(const std::vector<DrawRule>& rules, std::span<std::byte> places) {
  const size_t num_places = places.size() / kRuleBytes;
  TORCH_CHECK(rules.size() <= num_places, rules.size(), " rules for ",
              num_places, " places");
  for (size_t i = 0; i < num_places; ++i) {
    const k::SampleRule rule =
        i < rules.size() ? RuleOf(rules[i]) : k::SampleRule{.row = -1};
    std::memcpy(places.data() + i * kRuleBytes, &rule, kRuleBytes);
  }
}

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

DrawSpace MakeDrawSpace(int64_t num_places, int64_t vocab, int max_filters,
                        at::Device device) {
  const auto options = at::TensorOptions().device(device);
  const size_t num_bytes =
      k::SampleWorkspaceBytes(num_places, vocab, max_filters);
  return {.results_2N = at::empty({2, num_places}, options.dtype(at::kInt)),
          .workspace = at::empty({static_cast<int64_t>(num_bytes)},
                                 options.dtype(at::kByte))};
}

void QueueDraw(const at::Tensor& logits_RV, const at::Tensor& rules,
               int max_filters, const DrawSpace& space) {
  const int64_t num_places = space.results_2N.size(1);
  auto* tokens = space.results_2N.mutable_data_ptr<int32_t>();
  C10_CUDA_CHECK(k::SampleTokens(
      {.num_rules = num_places,
       .vocab = logits_RV.size(1),
       .logits_MV = logits_RV.const_data_ptr<float>(),
       .row_stride = logits_RV.stride(0),
       .rules_N =
           reinterpret_cast<const k::SampleRule*>(rules.const_data_ptr()),
       .max_filters = max_filters,
       .workspace = space.workspace.mutable_data_ptr(),
       .tokens_N = tokens,
       .logprobs_N = reinterpret_cast<float*>(tokens + num_places)},
      ops::cuda::CurrentStream()));
}

std::vector<std::optional<DrawResult>> FetchDraws(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules,
    const DrawSpace& space) {
  const ListedDraws listed(rules);
  at::Tensor results_2N = space.results_2N;
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

std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules) {
  std::vector<std::optional<DrawResult>> drawn;
  drawn.reserve(rules.size());
  // A prompt may have thousands of samples. To bound the workspace, the loop
  // draws for at most kRulesAtOnce rules at a time.
  for (size_t begin = 0; begin < rules.size(); begin += kRulesAtOnce) {
    const size_t end = std::min(rules.size(), begin + kRulesAtOnce);
    const std::vector<DrawRule> some(rules.begin() + begin,
                                     rules.begin() + end);
    std::vector<std::byte> places(some.size() * kRuleBytes);
    PutRules(some, places);
    const int max_filters = MaxFilters(some);
    const DrawSpace space =
        MakeDrawSpace(static_cast<int64_t>(some.size()), logits_RV.size(1),
                      max_filters, logits_RV.device());
    QueueDraw(
        logits_RV,
        ops::ToDevice(std::as_bytes(std::span(places)), logits_RV.device()),
        max_filters, space);
    std::ranges::move(FetchDraws(logits_RV, some, space),
                      std::back_inserter(drawn));
  }
  return drawn;
}

}  // namespace weft::sampling::cuda
