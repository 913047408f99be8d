// Allocates the numbered pages of a fixed-size cache, with reference counts. It
// holds no memory: the owner of the memory decides where page p is.
//
// A kept page is not freed when its last user releases it. It becomes idle, so
// that its content can be used again.
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
  // Creates pages [0, num_pages), all free.
  explicit PageAllocator(int32_t num_pages);
  PageAllocator(const PageAllocator&) = delete;
  PageAllocator& operator=(const PageAllocator&) = delete;

  // Returns a page with one reference, or none if all are in use. The page that
  // was released last comes first, because the processor's caches may still
  // hold its memory.
  [[nodiscard]] std::optional<PageId> Allocate();

  // Adds a reference to a page in use. Returns false if the page is not in use.
  bool Share(PageId page);

  // Drops a reference. If it was the last one, the page is freed or, if kept,
  // becomes idle. Returns false if the page is not in use.
  bool Release(PageId page);

  // Keeps a page that is in use. Returns false if it is not in use or is
  // already kept.
  bool Keep(PageId page);

  // Undoes Keep. An idle page becomes free. Returns false if it is not kept.
  bool Forget(PageId page);

  // Returns whether the page is kept and has no user.
  [[nodiscard]] bool IsIdle(PageId page) const;

  // Returns 0 for a free page and for a number that is not a page.
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
