// Gives an id to each pair of a token and its routing: the experts that the
// request wants for the token. The prefix tree compares these ids, so that data
// share rows only if their tokens go to the same experts.
#ifndef WEFT_SRC_ENGINE_ROUTED_TOKENS_H_
#define WEFT_SRC_ENGINE_ROUTED_TOKENS_H_

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "src/request/train.h"

namespace weft::engine {

// Returns the values of datum.routing that belong to token `index`; empty if
// the datum has no routing.
[[nodiscard]] absl::Span<const uint16_t> RoutingOf(const Datum& datum,
                                                   int64_t index);

// Threads: not thread-safe.
class RoutedTokens {
 public:
  // Returns one id for each token of the datum. Two ids are equal if and only
  // if both tokens and both routings are equal. The datum outlives this object,
  // which owns the ids.
  absl::Span<const int32_t> IdsOf(const Datum& datum);

  [[nodiscard]] int32_t token(int32_t id) const { return keys_[id].first; }
  // Returns the experts of the id's token; empty if the router chooses them.
  [[nodiscard]] absl::Span<const uint16_t> routing(int32_t id) const {
    return keys_[id].second;
  }

 private:
  using Key = std::pair<int32_t, absl::Span<const uint16_t>>;

  absl::flat_hash_map<Key, int32_t> ids_;
  std::vector<Key> keys_;
  std::deque<std::vector<int32_t>> sequences_;  // Addresses stay valid.
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ROUTED_TOKENS_H_
