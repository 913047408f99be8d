// Copies within the memory of keys, values and states, which whoever gives out
// pages and slots asks of the memory's owner.
#ifndef WEFT_SRC_REQUEST_CACHE_COPY_H_
#define WEFT_SRC_REQUEST_CACHE_COPY_H_

#include <cstdint>
#include <optional>
#include <variant>

namespace weft {

using PageId = int32_t;
using StateId = PageId;

// The slot of the rows of a decode step that have no sequence. No sequence has
// this slot.
inline constexpr StateId kPaddingState = 0;

// Copies the first `num_rows` rows of a page to another page.
struct PageCopy {
  PageId from = 0;
  PageId to = 0;
  int32_t num_rows = 0;

  friend bool operator==(const PageCopy&, const PageCopy&) = default;
};

// Copies a state, or sets it to zero.
struct StateCopy {
  std::optional<StateId> from;  // None: zero.
  StateId to = 0;

  friend bool operator==(const StateCopy&, const StateCopy&) = default;
};

using CacheCopy = std::variant<PageCopy, StateCopy>;

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_CACHE_COPY_H_
