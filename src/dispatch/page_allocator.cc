#include "src/dispatch/page_allocator.h"

namespace weft::dispatch {

PageAllocator::PageAllocator(int32_t num_pages)
    : references_(num_pages, 0), kept_(num_pages, false) {
  free_.reserve(num_pages);
  for (PageId page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

std::optional<PageId> PageAllocator::Allocate() {
  if (free_.empty()) return std::nullopt;
  const PageId page = free_.back();
  free_.pop_back();
  references_[page] = 1;
  return page;
}

bool PageAllocator::Share(PageId page) {
  if (num_references(page) == 0) return false;
  if (IsIdle(page)) --num_idle_;
  ++references_[page];
  return true;
}

bool PageAllocator::Release(PageId page) {
  if (num_references(page) == 0 || IsIdle(page)) return false;
  if (--references_[page] == 0) free_.push_back(page);
  if (IsIdle(page)) ++num_idle_;
  return true;
}

bool PageAllocator::Keep(PageId page) {
  if (num_references(page) == 0 || kept_[page]) return false;
  kept_[page] = true;
  ++references_[page];
  return true;
}

bool PageAllocator::Forget(PageId page) {
  if (num_references(page) == 0 || !kept_[page]) return false;
  if (IsIdle(page)) --num_idle_;
  kept_[page] = false;
  return Release(page);
}

bool PageAllocator::IsIdle(PageId page) const {
  return num_references(page) == 1 && kept_[page];
}

int32_t PageAllocator::num_references(PageId page) const {
  return page >= 0 && page < num_pages() ? references_[page] : 0;
}

}  // namespace weft::dispatch
