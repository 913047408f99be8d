#include "src/model/expert_rows.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <utility>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"
#include "src/ops/host_copy.h"

namespace weft::moe {
namespace {

// Returns the segments of one expert's rows. `routing` has the segments of the
// batch, and [begin, end) are the tokens of the rows, in ascending order.
lora::LoraRouting RoutingOf(const int64_t* begin, const int64_t* end,
                            const lora::LoraRouting& routing) {
  lora::LoraRouting result;
  const int64_t* first = begin;
  for (const lora::LoraSegment& segment : routing) {
    first = std::lower_bound(first, end, segment.begin);
    const int64_t* last = std::lower_bound(first, end, segment.end);
    if (first == last) continue;
    result.push_back({.begin = first - begin,
                      .end = last - begin,
                      .version = segment.version});
    first = last;
  }
  return result;
}

}  // namespace

ExpertRows SortByExpert(const at::Tensor& experts_TK,
                        const lora::ExpertShape& experts,
                        const lora::LoraRouting& routing) {
  at::Tensor on_host = experts_TK;
  ops::ToHost({&on_host});
  const auto* chosen = on_host.const_data_ptr<int64_t>();
  const int64_t num_pairs = on_host.numel();
  const int64_t per_token = on_host.size(1);
  const int num_experts = experts.count;
  std::vector<int64_t> begins(num_experts + 1);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    TORCH_CHECK(chosen[pair] >= 0 && chosen[pair] < num_experts, "expert ",
                chosen[pair], " of token ", pair / per_token, " is not in [0, ",
                num_experts, ")");
    if (experts.Has(chosen[pair])) ++begins[chosen[pair] + 1];
  }
  for (int i = 0; i < num_experts; ++i) begins[i + 1] += begins[i];

  const int64_t num_rows = begins.back();
  const at::Tensor tokens_N = at::empty({num_rows}, at::kLong);
  const at::Tensor pairs_N = at::empty_like(tokens_N);
  const at::Tensor places_TK = at::empty_like(on_host);
  auto* tokens = tokens_N.mutable_data_ptr<int64_t>();
  auto* pairs = pairs_N.mutable_data_ptr<int64_t>();
  auto* places = places_TK.mutable_data_ptr<int64_t>();
  std::vector<int64_t> next(begins.begin(), begins.end() - 1);
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (!experts.Has(chosen[pair])) {
      places[pair] = num_rows;
      continue;
    }
    const int64_t row = next[chosen[pair]]++;
    tokens[row] = pair / per_token;
    pairs[row] = pair;
    places[pair] = row;
  }

  const at::Device device = experts_TK.device();
  ExpertRows rows{.tokens_N = ops::ToDevice(tokens_N, device),
                  .pairs_N = ops::ToDevice(pairs_N, device),
                  .places_TK = ops::ToDevice(places_TK, device),
                  .has_absent = num_rows < num_pairs};
  for (int i = 0; i < num_experts; ++i) {
    if (begins[i] == begins[i + 1]) continue;
    rows.parts.push_back(
        {.expert = i,
         .begin = begins[i],
         .end = begins[i + 1],
         .routing =
             RoutingOf(tokens + begins[i], tokens + begins[i + 1], routing)});
  }
  return rows;
}

at::Tensor GatherRows(const at::Tensor& x_TH, const at::Tensor& tokens_N) {
  if (!ops::HasCpuKernel(x_TH) || !x_TH.is_contiguous()) {
    return x_TH.index_select(0, tokens_N);
  }
  const int64_t hidden = x_TH.size(1);
  at::Tensor x_NH = at::empty({tokens_N.size(0), hidden}, x_TH.options());
  const auto* tokens = tokens_N.const_data_ptr<int64_t>();
  const auto* from = x_TH.const_data_ptr<float>();
  auto* to = x_NH.mutable_data_ptr<float>();
  at::parallel_for(0, tokens_N.size(0), ops::RowGrain(hidden),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t n = begin; n < end; ++n) {
                       std::copy_n(from + tokens[n] * hidden, hidden,
                                   to + n * hidden);
                     }
                   });
  return x_NH;
}

at::Tensor SumOfRows(const at::Tensor& rows_NH, const at::Tensor& places_TK) {
  const int64_t per_token = places_TK.size(1);
  if (!ops::HasCpuKernel(rows_NH)) {
    at::Tensor sum_TH = rows_NH.index_select(0, places_TK.select(1, 0));
    for (int64_t k = 1; k < per_token; ++k) {
      sum_TH.add_(rows_NH.index_select(0, places_TK.select(1, k)));
    }
    return sum_TH;
  }
  const int64_t hidden = rows_NH.size(1);
  at::Tensor sum_TH = at::empty({places_TK.size(0), hidden}, rows_NH.options());
  const auto* places = places_TK.const_data_ptr<int64_t>();
  const auto* rows = rows_NH.const_data_ptr<float>();
  auto* sums = sum_TH.mutable_data_ptr<float>();
  const auto add_row = kernels::cpu::Kernels().add_row;
  at::parallel_for(0, places_TK.size(0), ops::RowGrain(per_token * hidden),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t t = begin; t < end; ++t) {
                       const int64_t* places_K = places + t * per_token;
                       float* sum_H = sums + t * hidden;
                       std::copy_n(rows + places_K[0] * hidden, hidden, sum_H);
                       for (int64_t k = 1; k < per_token; ++k) {
                         add_row(rows + places_K[k] * hidden, hidden, sum_H);
                       }
                     }
                   });
  return sum_TH;
}

}  // namespace weft::moe
