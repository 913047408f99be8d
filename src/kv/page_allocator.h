// Hands out the pages of a cache of fixed size, by number, with reference
// counts. It knows no memory: page p is wherever the owner of the memory says.
//
// A page may be kept for whoever may need its content again: it is idle, not
// free, once its last user has released it.
// Threads: not thread-safe. All operations take constant time.
#ifndef WEFT_SRC_KV_PAGE_ALLOCATOR_H_
#define WEFT_SRC_KV_PAGE_ALLOCATOR_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace weft::kv {

using PageId = int32_t;

class PageAllocator {
 public:
  // Pages [0, num_pages), all free.
  explicit PageAllocator(int32_t num_pages);
  PageAllocator(const PageAllocator&) = delete;
  PageAllocator& operator=(const PageAllocator&) = delete;

  // A page with one reference; none when all are in use. The page released
  // last comes first: its memory is the warmest.
  [[nodiscard]] std::optional<PageId> Allocate();

  // One more reference to a page in use. False: the page is not in use.
  bool Share(PageId page);

  // One reference less; the last one frees the page. False: not in use.
  bool Release(PageId page);

  // A reference that does not count as use. False: not in use, or kept already.
  bool Keep(PageId page);

  // Takes back what Keep gave; an idle page is free then. False: not kept.
  bool Forget(PageId page);

  // A kept page that nobody uses.
  [[nodiscard]] bool IsIdle(PageId page) const;

  // 0 for free pages and for numbers that are no page.
  [[nodiscard]] int32_t num_references(PageId page) const;
  [[nodiscard]] int32_t num_pages() const {
    return static_cast<int32_t>(references_.size());
  }
  [[nodiscard]] int32_t num_free() const {
    return static_cast<int32_t>(free_.size());
  }
  [[nodiscard]] int32_t num_idle() const { return num_idle_; }
  [[nodiscard]] int32_t num_used() const {
    return num_pages() - num_free() - num_idle();
  }

 private:
  std::vector<int32_t> references_;  // By page.
  std::vector<bool> kept_;           // By page.
  std::vector<PageId> free_;         // A stack.
  int32_t num_idle_ = 0;
};

}  // namespace weft::kv

#endif  // WEFT_SRC_KV_PAGE_ALLOCATOR_H_
