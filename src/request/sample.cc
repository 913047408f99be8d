#include "src/request/sample.h"

#include <algorithm>

namespace weft {

int64_t SampleRequest::first_scored() const {
  auto first = static_cast<int64_t>(prompt.size());
  if (prompt_alternatives > 0) first = std::min<int64_t>(first, 1);
  if (prompt_logprobs || prompt_top_logprobs > 0) {
    first = std::min(first, first_of_last_n());
  }
  // The first offset that is not 0 is that of the first position with targets.
  const auto target = std::ranges::upper_bound(prompt_target_offsets, 0);
  if (target != prompt_target_offsets.end()) {
    first = std::min(first, target - prompt_target_offsets.begin());
  }
  return first;
}

}  // namespace weft
