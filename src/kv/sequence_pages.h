// The page table of one sequence: where the keys and values of its tokens are.
//
// Token t is in slot pages()[t / page_size] * page_size + t % page_size of a
// memory with num_pages * page_size rows.
// Threads: not thread-safe; nor are sequences of the same allocator.
#ifndef WEFT_SRC_KV_SEQUENCE_PAGES_H_
#define WEFT_SRC_KV_SEQUENCE_PAGES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "src/kv/page_allocator.h"

namespace weft::kv {

// Rows that the caller must copy before the new sequence is used.
struct PageCopy {
  PageId from = 0;
  PageId to = 0;
  int32_t num_rows = 0;  // The first rows of the page.

  friend bool operator==(const PageCopy&, const PageCopy&) = default;
};

// Movable; releases its pages when destroyed. `allocator` outlives it.
class SequencePages {
 public:
  struct Fork;

  // page_size: rows of a page, >= 1.
  SequencePages(PageAllocator* allocator, int32_t page_size);
  // Begins with the tokens of `full_pages`, which are in use or kept, and
  // shares them.
  SequencePages(PageAllocator* allocator, int32_t page_size,
                std::vector<PageId> full_pages);
  ~SequencePages() { Release(); }
  SequencePages(SequencePages&& other) noexcept;
  SequencePages& operator=(SequencePages&& other) noexcept;
  SequencePages(const SequencePages&) = delete;
  SequencePages& operator=(const SequencePages&) = delete;

  // Makes room for `count` more tokens; false, and no change, when that needs
  // more pages than are free.
  [[nodiscard]] bool AppendMany(int64_t count);

  // A second sequence with the same tokens. Full pages are shared; a last page
  // with room left gets a copy of its own, which the caller fills. None, and
  // no change, when that page is not to be had.
  [[nodiscard]] std::optional<Fork> ForkSequence() const;

  // From now on `page`, in use or kept, holds what pages()[index] held.
  void Exchange(size_t index, PageId page);

  // Gives all pages back; the sequence is empty then.
  void Release();

  [[nodiscard]] int64_t Slot(int64_t token) const {
    return int64_t{pages_[token / page_size_]} * page_size_ +
           token % page_size_;
  }
  [[nodiscard]] int64_t num_tokens() const { return num_tokens_; }
  [[nodiscard]] const std::vector<PageId>& pages() const { return pages_; }

 private:
  PageAllocator* allocator_;
  int32_t page_size_;
  int64_t num_tokens_ = 0;
  std::vector<PageId> pages_;
};

struct SequencePages::Fork {
  SequencePages sequence;
  std::optional<PageCopy> copy;
};

}  // namespace weft::kv

#endif  // WEFT_SRC_KV_SEQUENCE_PAGES_H_
