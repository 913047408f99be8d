#include "src/sampling/draw_rows_cuda.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <vector>

#include "kernels/cuda/sampler.h"
#include "kernels/cuda/token_lists.h"
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

// What the host needs of the rows of logits that rules with lists draw from:
// the likeliest tokens of a row, or all its logits if a rule depends on all.
class ListedRows {
 public:
  ListedRows(const std::vector<DrawRule>& rules, int64_t vocab)
      : vocab_(vocab) {
    std::map<int32_t, size_t> sizes;  // By row.
    for (const DrawRule& rule : rules) {
      const size_t size = ListSize(rule.config, static_cast<size_t>(vocab));
      if (size > 0) sizes[rule.row] = std::max(sizes[rule.row], size);
    }
    for (const auto& [row, size] : sizes) {
      // An entry of a list has twice the bytes of a logit.
      if (2 * static_cast<int64_t>(size) >= vocab) {
        whole_rows_.push_back(row);
        continue;
      }
      lists_.push_back({.row = row,
                        .size = static_cast<int32_t>(size),
                        .begin = num_tokens_});
      num_tokens_ += static_cast<int64_t>(size);
    }
  }

  // Queues what Fetch copies.
  void Queue(const at::Tensor& logits_RV) {
    const at::Device device = logits_RV.device();
    if (!whole_rows_.empty()) {
      whole_LV_ = logits_RV.index_select(0, ops::ToDevice(whole_rows_, device));
    }
    if (lists_.empty()) return;
    const at::Tensor lists_N =
        ops::ToDevice(std::as_bytes(std::span(lists_)), device);
    tokens_ =
        at::empty({num_tokens_}, at::TensorOptions(at::kInt).device(device));
    logits_ =
        at::empty({num_tokens_}, at::TensorOptions(at::kFloat).device(device));
    C10_CUDA_CHECK(k::ListTokens(
        {.num_lists = static_cast<int64_t>(lists_.size()),
         .vocab = vocab_,
         .logits_MV = logits_RV.const_data_ptr<float>(),
         .row_stride = logits_RV.stride(0),
         .lists_N = static_cast<const k::TokenList*>(lists_N.const_data_ptr()),
         .tokens = tokens_.mutable_data_ptr<int32_t>(),
         .logits = logits_.mutable_data_ptr<float>()},
        ops::cuda::CurrentStream()));
  }
  // Copies the results of Queue and of the draws to the host.
  void Fetch(at::Tensor& results_2N, at::Tensor& log_totals_N) {
    ops::ToHost({&results_2N, &log_totals_N, &whole_LV_, &tokens_, &logits_});
  }

  // Returns the result of a rule with lists, given a draw without lists. After
  // Fetch.
  DrawResult Draw(const DrawRule& rule, const DrawResult& drawn,
                  double log_total) const {
    const float uniform =
        CounterUniform(rule.seed, rule.sample_index, rule.position);
    const auto list =
        std::ranges::lower_bound(lists_, rule.row, {}, &k::TokenList::row);
    if (list != lists_.end() && list->row == rule.row) {
      const auto size = static_cast<size_t>(list->size);
      return DrawFromList(
          {.tokens = {tokens_.const_data_ptr<int32_t>() + list->begin, size},
           .logits = {logits_.const_data_ptr<float>() + list->begin, size},
           .log_total = log_total},
          rule.config, uniform, drawn);
    }
    const auto row = std::ranges::lower_bound(whole_rows_, rule.row);
    const int64_t place = row - whole_rows_.begin();
    return DrawToken({whole_LV_.const_data_ptr<float>() + place * vocab_,
                      static_cast<size_t>(vocab_)},
                     rule.config, uniform)
        .value_or(drawn);
  }

 private:
  const int64_t vocab_;
  // Both in the order of rows.
  std::vector<k::TokenList> lists_;
  std::vector<int64_t> whole_rows_;
  int64_t num_tokens_ = 0;  // Of all lists.
  at::Tensor whole_LV_;
  at::Tensor tokens_, logits_;  // Of all lists, one after another.
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

// The results of the kernels for N rules, on the device.
struct Results {
  at::Tensor results_2N;    // i32: tokens, then the bits of logprobs.
  at::Tensor log_totals_N;  // f64.
};

Results QueueDraws(const at::Tensor& logits_RV,
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
  Results results = {
      .results_2N = at::empty({2, num_rules}, options.dtype(at::kInt)),
      .log_totals_N = at::empty({num_rules}, options.dtype(at::kDouble))};
  auto* const tokens = results.results_2N.mutable_data_ptr<int32_t>();
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
         .logprobs_N = logprobs + begin,
         .log_totals_N =
             results.log_totals_N.mutable_data_ptr<double>() + begin},
        ops::cuda::CurrentStream()));
  }
  return results;
}

}  // namespace

std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules) {
  if (rules.empty()) return {};
  ListedRows listed(rules, logits_RV.size(1));
  Results results = QueueDraws(logits_RV, rules);
  listed.Queue(logits_RV);
  listed.Fetch(results.results_2N, results.log_totals_N);

  const int32_t* tokens = results.results_2N.const_data_ptr<int32_t>();
  const int32_t* logprobs = tokens + results.results_2N.size(1);
  const double* log_totals = results.log_totals_N.const_data_ptr<double>();
  const auto vocab = static_cast<size_t>(logits_RV.size(1));
  std::vector<std::optional<DrawResult>> drawn(rules.size());
  std::vector<size_t> with_lists;
  for (size_t i = 0; i < rules.size(); ++i) {
    if (tokens[i] < 0) continue;
    drawn[i] = DrawResult{.token = tokens[i],
                          .logprob = std::bit_cast<float>(logprobs[i])};
    if (ListSize(rules[i].config, vocab) > 0) with_lists.push_back(i);
  }
  // Without lists wakes no threads, because the device waits meanwhile.
  at::parallel_for(
      0, std::ssize(with_lists), 1, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
          const size_t i = with_lists[n];
          drawn[i] = listed.Draw(rules[i], *drawn[i], log_totals[i]);
        }
      });
  return drawn;
}

}  // namespace weft::sampling::cuda
