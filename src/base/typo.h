// What a user may have meant by a word that is not known.
#ifndef WEFT_SRC_BASE_TYPO_H_
#define WEFT_SRC_BASE_TYPO_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace weft {

// Returns the Levenshtein distance.
size_t EditDistance(absl::string_view a, absl::string_view b);

// Returns the largest distance at which a known word may be meant by `word`.
inline size_t FarthestTypo(absl::string_view word) {
  return 1 + word.size() / 3;
}

}  // namespace weft

#endif  // WEFT_SRC_BASE_TYPO_H_
