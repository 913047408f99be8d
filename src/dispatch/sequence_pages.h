// The page table of one sequence. It maps the sequence's tokens to the slots of
// their keys and values.
//
// Token t is in slot pages()[t / page_size] * page_size + t % page_size of a
// memory with num_pages * page_size rows.
// Threads: not thread-safe. One thread uses all sequences of an allocator.
#ifndef WEFT_SRC_DISPATCH_SEQUENCE_PAGES_H_
#define WEFT_SRC_DISPATCH_SEQUENCE_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "src/dispatch/page_allocator.h"
#include "src/dispatch/state_slot.h"
#include "src/request/cache_copy.h"

namespace weft::dispatch {

// The pages of one sequence, and the slot of its state in models that have
// states. The destructor releases them. `allocator` outlives the object.
class SequencePages {
 public:
  struct Fork;

  // `page_size` is the number of rows in a page, >= 1.
  SequencePages(PageAllocator* allocator, int32_t page_size);
  // Starts with the tokens of `full_pages`. Shares these pages, which must be
  // in use or idle.
  SequencePages(PageAllocator* allocator, int32_t page_size,
                std::vector<PageId> full_pages);
  ~SequencePages() { Release(); }
  SequencePages(SequencePages&& other) noexcept;
  SequencePages& operator=(SequencePages&& other) noexcept;
  SequencePages(const SequencePages&) = delete;
  SequencePages& operator=(const SequencePages&) = delete;

  // Makes room for `count` more tokens. If there are not enough free pages,
  // returns false and changes nothing.
  [[nodiscard]] bool AppendMany(int64_t count);

  // Returns a second sequence with the same tokens. Both sequences share the
  // full pages. If the last page is partly filled, the new sequence gets a new
  // page, to which the caller copies the rows (Fork::copy). If a new page is
  // needed and no page is free, returns nullopt and changes nothing. The new
  // sequence has no state.
  std::optional<Fork> ForkSequence() const;

  // Replaces pages()[index] by `page`, which is in use or idle and has the same
  // content.
  void Exchange(size_t index, PageId page);

  // Releases all pages and the state, and leaves the sequence empty.
  void Release();

  int64_t Slot(int64_t token) const {
    return int64_t{pages_[token / page_size_]} * page_size_ +
           token % page_size_;
  }
  int64_t num_tokens() const { return num_tokens_; }
  const std::vector<PageId>& pages() const { return pages_; }
  const StateSlot& state() const { return state_; }
  void SetState(StateSlot state) { state_ = std::move(state); }

 private:
  PageAllocator* allocator_;
  int32_t page_size_;
  int64_t num_tokens_ = 0;
  std::vector<PageId> pages_;
  StateSlot state_;
};

struct SequencePages::Fork {
  SequencePages sequence;
  std::optional<PageCopy> copy;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_SEQUENCE_PAGES_H_
