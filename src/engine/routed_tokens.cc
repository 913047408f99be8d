#include "src/engine/routed_tokens.h"

namespace weft::engine {

absl::Span<const uint16_t> RoutingOf(const Datum& datum, int64_t index) {
  const size_t width = datum.routing.size() / datum.tokens.size();
  return absl::MakeConstSpan(datum.routing)
      .subspan(static_cast<size_t>(index) * width, width);
}

absl::Span<const int32_t> RoutedTokens::IdsOf(const Datum& datum) {
  std::vector<int32_t>& ids = sequences_.emplace_back();
  ids.reserve(datum.tokens.size());
  for (int64_t i = 0; i < datum.num_tokens(); ++i) {
    const Key key(datum.tokens[i], RoutingOf(datum, i));
    const auto [entry, is_new] =
        ids_.try_emplace(key, static_cast<int32_t>(keys_.size()));
    if (is_new) keys_.push_back(key);
    ids.push_back(entry->second);
  }
  return ids;
}

}  // namespace weft::engine
