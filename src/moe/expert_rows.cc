#include "src/moe/expert_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "src/ops/host_copy.h"

namespace weft::moe {
namespace {

// Returns the segments of the batch inside one expert's rows, whose tokens are
// in ascending order.
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

}  // namespace weft::moe
