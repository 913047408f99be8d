#include "src/engine/kv_pool.h"

#include <algorithm>
#include <utility>

namespace weft::engine {
KvPool::KvPool(int64_t bytes_per_page, int64_t bytes,
               std::function<void(const kv::PageCopy&)> copy_page)
    : bytes_per_page_(bytes_per_page),
      num_pages_(
          std::max<int64_t>(1, bytes / std::max<int64_t>(1, bytes_per_page_))),
      allocator_(static_cast<int32_t>(num_pages_)),
      prefixes_(&allocator_, kPageTokens),
      copy_page_(std::move(copy_page)) {}

kv::SequencePages KvPool::Begin(uint64_t version,
                                absl::Span<const int32_t> tokens) {
  return {&allocator_, kPageTokens, prefixes_.Lookup(version, tokens)};
}

bool KvPool::Append(kv::SequencePages& sequence, int64_t count) {
  const auto held = static_cast<int64_t>(sequence.pages().size());
  MakeFree(PagesFor(sequence.num_tokens() + count) - held);
  return sequence.AppendMany(count);
}

std::optional<kv::SequencePages> KvPool::Fork(const kv::SequencePages& source) {
  if (source.num_tokens() % kPageTokens > 0) MakeFree(1);
  std::optional<kv::SequencePages::Fork> fork = source.ForkSequence();
  if (!fork.has_value()) return std::nullopt;
  if (fork->copy.has_value()) copy_page_(*fork->copy);
  return std::move(fork->sequence);
}

void KvPool::CachePrefix(uint64_t version, absl::Span<const int32_t> tokens,
                         kv::SequencePages& sequence) {
  prefixes_.Insert(version, tokens, sequence);
}

void KvPool::MakeFree(int64_t count) {
  const int64_t missing = count - allocator_.num_free();
  if (missing > 0) prefixes_.Evict(missing);
}

}  // namespace weft::engine
