#include "src/dispatch/sequence_pages.h"

#include <utility>

namespace weft::dispatch {

SequencePages::SequencePages(PageAllocator* allocator, int32_t page_size)
    : allocator_(allocator), page_size_(page_size) {}

SequencePages::SequencePages(PageAllocator* allocator, int32_t page_size,
                             std::vector<PageId> full_pages)
    : allocator_(allocator),
      page_size_(page_size),
      num_tokens_(static_cast<int64_t>(full_pages.size()) * page_size),
      pages_(std::move(full_pages)) {
  for (const PageId page : pages_) allocator_->Share(page);
}

SequencePages::SequencePages(SequencePages&& other) noexcept
    : allocator_(other.allocator_),
      page_size_(other.page_size_),
      num_tokens_(std::exchange(other.num_tokens_, 0)),
      pages_(std::exchange(other.pages_, {})),
      state_(std::move(other.state_)) {}

SequencePages& SequencePages::operator=(SequencePages&& other) noexcept {
  if (this != &other) {
    Release();
    allocator_ = other.allocator_;
    page_size_ = other.page_size_;
    num_tokens_ = std::exchange(other.num_tokens_, 0);
    pages_ = std::exchange(other.pages_, {});
    state_ = std::move(other.state_);
  }
  return *this;
}

bool SequencePages::AppendMany(int64_t count) {
  const auto held = static_cast<int64_t>(pages_.size());
  const int64_t room = held * page_size_ - num_tokens_;
  const int64_t needed =
      count <= room ? 0 : (count - room + page_size_ - 1) / page_size_;
  if (needed > allocator_->num_free()) return false;
  for (int64_t i = 0; i < needed; ++i)
    pages_.push_back(*allocator_->Allocate());
  num_tokens_ += count;
  return true;
}

std::optional<SequencePages::Fork> SequencePages::ForkSequence() const {
  Fork fork{.sequence = SequencePages(allocator_, page_size_),
            .copy = std::nullopt};
  const auto partial_rows = static_cast<int32_t>(num_tokens_ % page_size_);
  const int64_t num_full = num_tokens_ / page_size_;
  if (partial_rows > 0) {
    const std::optional<PageId> page = allocator_->Allocate();
    if (!page) return std::nullopt;
    fork.copy = PageCopy{
        .from = pages_[num_full], .to = *page, .num_rows = partial_rows};
  }
  for (int64_t i = 0; i < num_full; ++i) {
    allocator_->Share(pages_[i]);
    fork.sequence.pages_.push_back(pages_[i]);
  }
  if (fork.copy) fork.sequence.pages_.push_back(fork.copy->to);
  fork.sequence.num_tokens_ = num_tokens_;
  return fork;
}

void SequencePages::Exchange(size_t index, PageId page) {
  allocator_->Share(page);
  allocator_->Release(pages_[index]);
  pages_[index] = page;
}

void SequencePages::Release() {
  for (const PageId page : pages_) allocator_->Release(page);
  pages_.clear();
  num_tokens_ = 0;
  state_ = StateSlot();
}

}  // namespace weft::dispatch
