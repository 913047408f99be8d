// The tokens from which a sampler could draw.
#ifndef WEFT_SRC_REQUEST_TOKEN_SUPPORT_H_
#define WEFT_SRC_REQUEST_TOKEN_SUPPORT_H_

#include <cstdint>
#include <vector>

namespace weft {

// The most ids of one token's support. A sampler that returns supports draws
// from at most so many tokens.
inline constexpr int kMaxSupport = 1024;

// The supports of N tokens: for each token, the ids that had a probability when
// it was drawn. Row i is [offsets[i], offsets[i + 1]) of `tokens`: 1 to
// kMaxSupport ids, which increase. An empty row means the whole vocabulary.
//
// A set of ids stays the sampler's set when the weights change. A threshold of
// the logits does not: after an update, other logits are above it.
struct TokenSupport {
  std::vector<uint32_t> offsets;  // [N + 1], or empty: no token has a support.
  std::vector<int32_t> tokens;

  // Appends the row of the next token.
  void Add(const std::vector<int32_t>& ids) {
    if (offsets.empty()) offsets.push_back(0);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    offsets.push_back(static_cast<uint32_t>(tokens.size()));
  }

  friend bool operator==(const TokenSupport&, const TokenSupport&) = default;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_TOKEN_SUPPORT_H_
