// Manages the pages of the key/value cache and the prompt prefixes that are
// cached in them. When no page is free, cached prefixes that no sequence uses
// are evicted. The executor owns the pages' memory.
#ifndef WEFT_SRC_ENGINE_KV_POOL_H_
#define WEFT_SRC_ENGINE_KV_POOL_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/types/span.h"
#include "src/dispatch/page_allocator.h"
#include "src/dispatch/prefix_cache.h"
#include "src/dispatch/sequence_pages.h"

namespace weft::engine {

inline constexpr int64_t kPageTokens = 16;

// Threads: engine thread only, except num_pages and bytes_per_page.
class KvPool {
 public:
  // The pool has at least one page, even if `bytes` is less than a page's size.
  // `copy_page` copies rows from one page's memory to another's.
  KvPool(int64_t bytes_per_page, int64_t bytes,
         std::function<void(const kv::PageCopy&)> copy_page);

  [[nodiscard]] static int64_t PagesFor(int64_t num_tokens) {
    return (num_tokens + kPageTokens - 1) / kPageTokens;
  }
  [[nodiscard]] int64_t num_pages() const { return num_pages_; }
  // Returns the number of pages that no sequence uses.
  [[nodiscard]] int64_t available_pages() const {
    return allocator_.num_free() + allocator_.num_idle();
  }
  // Returns the number of pages of cached prefixes, used by sequences or not.
  [[nodiscard]] int64_t prefix_pages() const { return prefixes_.num_pages(); }
  [[nodiscard]] int64_t bytes_per_page() const { return bytes_per_page_; }

  // Returns a sequence that begins with the longest prefix of `tokens` that is
  // cached for `version` (a weights id), in whole pages. The sequence is empty
  // if no prefix is cached.
  [[nodiscard]] kv::SequencePages Begin(uint64_t version,
                                        absl::Span<const int32_t> tokens);
  // Makes room for `count` more tokens. If there is no room, returns false and
  // leaves the sequence as it is.
  [[nodiscard]] bool Append(kv::SequencePages& sequence, int64_t count);
  // Returns a second sequence with the same tokens. Returns none if no page is
  // free for the copy of a partly filled last page.
  [[nodiscard]] std::optional<kv::SequencePages> Fork(
      const kv::SequencePages& source);

  // Caches the full pages of `tokens`, which are the sequence's first tokens
  // and were computed with `version`. If equal pages are cached already, this
  // sequence shares them from now on.
  void CachePrefix(uint64_t version, absl::Span<const int32_t> tokens,
                   kv::SequencePages& sequence);
  void Forget(uint64_t version) { prefixes_.DropVersion(version); }

 private:
  // Evicts cached prefixes until `count` pages are free or nothing can be
  // evicted.
  void MakeFree(int64_t count);

  const int64_t bytes_per_page_;
  const int64_t num_pages_;
  kv::PageAllocator allocator_;
  kv::PrefixCache prefixes_;
  const std::function<void(const kv::PageCopy&)> copy_page_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_KV_POOL_H_
