#include "src/moe/expert_rows.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

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

ExpertRows SortByExpert(const at::Tensor& experts_TK, int num_experts,
                        const lora::LoraRouting& routing) {
  const at::Tensor on_host = experts_TK.cpu();
  const auto* experts = on_host.const_data_ptr<int64_t>();
  const int64_t num_rows = on_host.numel();
  const int64_t per_token = on_host.size(1);
  std::vector<int64_t> begins(num_experts + 1);
  for (int64_t pair = 0; pair < num_rows; ++pair) {
    TORCH_CHECK(experts[pair] >= 0 && experts[pair] < num_experts, "expert ",
                experts[pair], " of token ", pair / per_token,
                " is not in [0, ", num_experts, ")");
    ++begins[experts[pair] + 1];
  }
  for (int i = 0; i < num_experts; ++i) begins[i + 1] += begins[i];

  const at::Tensor tokens_N = at::empty({num_rows}, at::kLong);
  const at::Tensor pairs_N = at::empty_like(tokens_N);
  const at::Tensor places_TK = at::empty_like(on_host);
  auto* tokens = tokens_N.mutable_data_ptr<int64_t>();
  auto* pairs = pairs_N.mutable_data_ptr<int64_t>();
  auto* places = places_TK.mutable_data_ptr<int64_t>();
  std::vector<int64_t> next(begins.begin(), begins.end() - 1);
  for (int64_t pair = 0; pair < num_rows; ++pair) {
    const int64_t row = next[experts[pair]]++;
    tokens[row] = pair / per_token;
    pairs[row] = pair;
    places[pair] = row;
  }

  ExpertRows rows{.tokens_N = tokens_N.to(experts_TK.device()),
                  .pairs_N = pairs_N.to(experts_TK.device()),
                  .places_TK = places_TK.to(experts_TK.device())};
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
