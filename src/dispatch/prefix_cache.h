// Finds the pages that already have the keys and values of a prefix. A sequence
// with that prefix then does not compute them again.
//
// An entry of the cache is a full page. The page's keys and values depend on
// the weights and on all earlier tokens. So the cache finds an entry by the
// version of the weights, the previous page and the page's own tokens. Lookups
// compare the tokens themselves, not hashes.
//
// The cache keeps its pages (PageAllocator::Keep). Evict frees pages that no
// sequence uses, the least recently used first. It frees a page only after it
// has freed all cached pages that follow the page.
// Threads: not thread-safe, and neither is the allocator that it shares.
#ifndef WEFT_SRC_DISPATCH_PREFIX_CACHE_H_
#define WEFT_SRC_DISPATCH_PREFIX_CACHE_H_

#include <compare>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/types/span.h"
#include "src/dispatch/page_allocator.h"
#include "src/dispatch/sequence_pages.h"

namespace weft::kv {

class PrefixCache {
 public:
  // `page_size` is the number of tokens in a page, >= 1. `allocator` outlives
  // the cache.
  PrefixCache(PageAllocator* allocator, int32_t page_size);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // Returns the pages of the longest cached prefix of `tokens`; only full pages
  // count. The caller must share these pages before it allocates, evicts or
  // drops pages. A `version` must never be reused for other weights while the
  // cache exists.
  [[nodiscard]] std::vector<PageId> Lookup(uint64_t version,
                                           absl::Span<const int32_t> tokens);

  // Adds the full pages of `tokens`, which are the first tokens of `sequence`.
  // If a page with the same version and prefix is already cached, `sequence`
  // uses that page from now on. So a sequence that uses a cached page also uses
  // the cached pages of all earlier tokens.
  void Insert(uint64_t version, absl::Span<const int32_t> tokens,
              SequencePages& sequence);

  // Frees up to `count` pages that no sequence uses. Returns how many it freed.
  int64_t Evict(int64_t count);

  // Removes all pages of a version. A page in use becomes free when its last
  // user releases it.
  void DropVersion(uint64_t version);

  [[nodiscard]] int64_t num_pages() const { return num_pages_; }

 private:
  struct Key {
    uint64_t parent = 0;  // Id of the previous page's entry, or 0.
    std::vector<int32_t> tokens;

    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Entry {
    uint64_t id = 0;
    PageId page = 0;
    uint64_t version = 0;
    uint64_t last_used = 0;
    int64_t num_children = 0;
    Entry* parent = nullptr;  // Null for a first page.
    const Key* key = nullptr;
  };

  [[nodiscard]] Key KeyOf(const Entry* parent, absl::Span<const int32_t> tokens,
                          size_t page) const;
  // Marks all entries from the first page to `last` as used now. Does nothing
  // if `last` is null.
  void Touch(Entry* last);
  void Remove(Entry* leaf);

  PageAllocator* const allocator_;
  const int32_t page_size_;
  std::map<uint64_t, std::map<Key, Entry>> versions_;
  // Entries without children, by their last use. A use marks one path, and a
  // path has at most one leaf, so no two leaves have the same `last_used`.
  std::map<uint64_t, Entry*> leaves_;
  uint64_t now_ = 0;  // The number of uses so far, which serves as the time.
  uint64_t next_id_ = 1;
  int64_t num_pages_ = 0;
};

}  // namespace weft::kv

#endif  // WEFT_SRC_DISPATCH_PREFIX_CACHE_H_
