#include "src/sampling/draw_rows_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <limits>
#include <span>
#include <utility>

#include "kernels/cuda/sampler.h"
#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"

namespace weft::sampling::cuda {
namespace {

namespace k = kernels::cuda;

k::SampleRule RuleOf(const DrawRule& rule) {
  auto temperature = static_cast<float>(rule.config.temperature);
  if (rule.config.temperature > 0) {
    // Not one so small that f32 makes it 0, which is another rule.
    temperature = std::max(temperature, std::numeric_limits<float>::min());
  }
  return {.temperature = temperature,
          .top_k = rule.config.top_k,
          .top_p = rule.config.top_p,
          .seed = rule.seed,
          .sample_index = rule.sample_index,
          .position = rule.position};
}

// The rules where the kernel reads them.
at::Tensor Upload(const std::vector<DrawRule>& rules, at::Device device) {
  std::vector<k::SampleRule> items;
  items.reserve(rules.size());
  for (const DrawRule& rule : rules) items.push_back(RuleOf(rule));
  return ops::ToDevice(std::as_bytes(std::span(items)), device);
}

}  // namespace

std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules) {
  std::vector<std::optional<DrawResult>> drawn(rules.size());
  if (rules.empty()) return drawn;
  const at::Tensor rules_R = Upload(rules, logits_RV.device());
  at::Tensor tokens_R =
      at::empty({logits_RV.size(0)}, logits_RV.options().dtype(at::kInt));
  at::Tensor logprobs_R = at::empty({logits_RV.size(0)}, logits_RV.options());
  C10_CUDA_CHECK(k::SampleTokens(
      {.num_rows = logits_RV.size(0),
       .vocab = logits_RV.size(1),
       .logits_RV = logits_RV.const_data_ptr<float>(),
       .row_stride = logits_RV.stride(0),
       .rules_R =
           reinterpret_cast<const k::SampleRule*>(rules_R.const_data_ptr()),
       .tokens_R = tokens_R.mutable_data_ptr<int32_t>(),
       .logprobs_R = logprobs_R.mutable_data_ptr<float>()},
      ops::cuda::CurrentStream()));

  std::vector<int64_t> listed;  // Rows whose likeliest tokens are wanted.
  std::vector<DrawRule> listed_rules;
  for (size_t r = 0; r < rules.size(); ++r) {
    if (rules[r].config.top_logprobs == 0) continue;
    listed.push_back(static_cast<int64_t>(r));
    listed_rules.push_back(rules[r]);
  }
  at::Tensor listed_LV;
  if (!listed.empty()) {
    listed_LV =
        logits_RV.index_select(0, ops::ToDevice(listed, logits_RV.device()));
  }
  ops::ToHost({&tokens_R, &logprobs_R, &listed_LV});

  const int32_t* tokens = tokens_R.const_data_ptr<int32_t>();
  const float* logprobs = logprobs_R.const_data_ptr<float>();
  for (size_t r = 0; r < rules.size(); ++r) {
    if (tokens[r] < 0) continue;
    drawn[r] = DrawResult{.token = tokens[r], .logprob = logprobs[r]};
  }
  if (listed.empty()) return drawn;
  std::vector<std::optional<DrawResult>> on_host =
      sampling::DrawRows(listed_LV, listed_rules);
  for (size_t i = 0; i < listed.size(); ++i) {
    drawn[listed[i]] = std::move(on_host[i]);
  }
  return drawn;
}

}  // namespace weft::sampling::cuda
