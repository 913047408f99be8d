// Allocates the numbered pages of a cache of fixed size, and counts their
// references. It has no memory for pages: the owner of the memory decides where
// a page is.
//
// A page is free, in use or idle. When the last user of a page releases it, the
// page becomes free. A kept page (Keep) becomes idle instead, so that its
// content can be used again.
// Threads: not thread-safe. All operations take constant time.
#ifndef WEFT_SRC_DISPATCH_PAGE_ALLOCATOR_H_
#define WEFT_SRC_DISPATCH_PAGE_ALLOCATOR_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "src/request/cache_copy.h"

namespace weft::dispatch {

class PageAllocator {
 public:
  // Creates pages [0, num_pages), all free.
  explicit PageAllocator(int32_t num_pages);
  PageAllocator(const PageAllocator&) = delete;
  PageAllocator& operator=(const PageAllocator&) = delete;

  // Returns a page with one reference, or nullopt if no page is free. Returns
  // the page that was freed last, because the processor's caches may still hold
  // its memory.
  std::optional<PageId> Allocate();

  // Adds a user to a page that is in use or idle. Returns false if the page is
  // free. This and the next three methods return false if there is no such
  // page.
  bool Share(PageId page);

  // Removes a user of a page. If it was the last user, the page becomes free,
  // or idle if the page is kept. Returns false if the page is not in use.
  bool Release(PageId page);

  // Keeps a page that is in use. Returns false if the page is free or already
  // kept.
  bool Keep(PageId page);

  // Ends the effect of Keep. An idle page becomes free. Returns false if the
  // page is not kept.
  bool Forget(PageId page);

  // Returns whether the page is kept and has no user.
  bool IsIdle(PageId page) const;

  // Returns the number of the page's users, plus one if the page is kept.
  // Returns 0 for a number that is not a page.
  int32_t num_references(PageId page) const;
  int32_t num_pages() const { return static_cast<int32_t>(references_.size()); }
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_idle() const { return num_idle_; }
  int32_t num_used() const { return num_pages() - num_free() - num_idle(); }

 private:
  std::vector<int32_t> references_;  // By page.
  std::vector<bool> kept_;           // By page.
  std::vector<PageId> free_;         // A stack of the free pages.
  int32_t num_idle_ = 0;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_PAGE_ALLOCATOR_H_
