#include "src/sampling/stop_matcher.h"

#include <algorithm>
#include <string_view>

namespace weft::sampling {
namespace {

// Removes all elements except the last `count`.
template <typename Sequence>
void KeepLast(Sequence& sequence, size_t count) {
  if (sequence.size() <= count) return;
  sequence.erase(sequence.begin(), sequence.end() - count);
}

bool EndsWith(const std::vector<int32_t>& tokens,
              const std::vector<int32_t>& end) {
  return tokens.size() >= end.size() &&
         std::equal(end.rbegin(), end.rend(), tokens.rbegin());
}

}  // namespace

StopMatcher::StopMatcher(const StopRule& rule, const TokenBytes* token_bytes)
    : rule_(rule), token_bytes_(token_bytes) {
  // An empty sequence would match everywhere, even before the first token.
  std::erase_if(rule_.token_sequences,
                [](const auto& sequence) { return sequence.empty(); });
  std::erase_if(rule_.byte_strings,
                [](const auto& text) { return text.empty(); });
  for (const auto& sequence : rule_.token_sequences) {
    longest_sequence_ = std::max(longest_sequence_, sequence.size());
  }
  for (const std::string& text : rule_.byte_strings) {
    longest_string_ = std::max(longest_string_, text.size());
  }
}

bool StopMatcher::Push(int32_t token) {
  bool stops =
      std::ranges::find(rule_.token_ids, token) != rule_.token_ids.end();
  if (longest_sequence_ > 0) {
    recent_.push_back(token);
    KeepLast(recent_, longest_sequence_);
    stops |= std::ranges::any_of(
        rule_.token_sequences,
        [this](const auto& sequence) { return EndsWith(recent_, sequence); });
  }
  if (longest_string_ > 0 && token_bytes_ != nullptr) {
    tail_ += token_bytes_->Bytes(token);
    // A match may begin in the bytes of earlier tokens, which tail_ keeps. The
    // match ends in this token, because an earlier match would have ended the
    // sample.
    stops |= std::ranges::any_of(rule_.byte_strings, [this](const auto& text) {
      return tail_.find(text) != std::string::npos;
    });
    KeepLast(tail_, longest_string_ - 1);
  }
  return stops;
}

}  // namespace weft::sampling
