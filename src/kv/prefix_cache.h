// Remembers which pages hold the keys and values of which tokens, so that a
// sequence that begins with them need not compute them again.
//
// Keys and values depend on the weights and on every token before: an entry is
// a full page, found by the version of the weights, the page before it and its
// own tokens. Tokens are compared, never hashes of them.
//
// The cache keeps its pages (PageAllocator::Keep). Pages that no sequence uses
// may be evicted, the least recently used first. A page is evicted after the
// pages that follow it in their prefixes.
// Threads: not thread-safe; users of one allocator must take turns.
#ifndef WEFT_SRC_KV_PREFIX_CACHE_H_
#define WEFT_SRC_KV_PREFIX_CACHE_H_

#include <compare>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/types/span.h"
#include "src/kv/page_allocator.h"
#include "src/kv/sequence_pages.h"

namespace weft::kv {

class PrefixCache {
 public:
  // page_size: tokens of a page, >= 1. `allocator` outlives the cache.
  PrefixCache(PageAllocator* allocator, int32_t page_size);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // The pages of the longest known prefix of `tokens`, whole pages only. The
  // caller shares them before it allocates, evicts or drops anything.
  // `version`: a number that never stands for other weights.
  [[nodiscard]] std::vector<PageId> Lookup(uint64_t version,
                                           absl::Span<const int32_t> tokens);

  // Remembers the pages that `tokens`, the first ones of the sequence, fill.
  // Where another page with the same tokens is known that one stays, and the
  // sequence uses it from now on: nobody uses a page but not the one before.
  void Insert(uint64_t version, absl::Span<const int32_t> tokens,
              SequencePages& sequence);

  // Frees up to `count` pages that nobody uses; returns how many.
  int64_t Evict(int64_t count);

  // Forgets all pages of a version. Those in use are freed by their users.
  void DropVersion(uint64_t version);

  [[nodiscard]] int64_t num_pages() const { return num_pages_; }

 private:
  struct Key {
    uint64_t parent = 0;  // Id of the entry before; 0: a first page.
    std::vector<int32_t> tokens;

    friend auto operator<=>(const Key&, const Key&) = default;
  };
  struct Entry {
    uint64_t id = 0;
    PageId page = 0;
    uint64_t version = 0;
    uint64_t last_used = 0;
    int64_t num_children = 0;
    Entry* parent = nullptr;  // Null: a first page.
    const Key* key = nullptr;
  };

  [[nodiscard]] Key KeyOf(const Entry* parent, absl::Span<const int32_t> tokens,
                          size_t page) const;
  // Records that the path from a first page to `last` was used now.
  void Touch(Entry* last);
  void Remove(Entry* leaf);

  PageAllocator* const allocator_;
  const int32_t page_size_;
  std::map<uint64_t, std::map<Key, Entry>> versions_;
  // Entries without children by their last use. Every use is of one path, which
  // has one leaf at most, so no two leaves have the same time.
  std::map<uint64_t, Entry*> leaves_;
  uint64_t now_ = 0;  // Counts uses.
  uint64_t next_id_ = 1;
  int64_t num_pages_ = 0;
};

}  // namespace weft::kv

#endif  // WEFT_SRC_KV_PREFIX_CACHE_H_
