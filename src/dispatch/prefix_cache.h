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
//
// In a model with states, a sequence can only begin where the cache has a state
// after the last token of a page. So a prefix ends there, although more pages
// may agree. States are few: they are evicted on their own, by their own uses,
// and go with their pages at the latest.
// Threads: not thread-safe, and neither is the allocator that it shares.
#ifndef WEFT_SRC_DISPATCH_PREFIX_CACHE_H_
#define WEFT_SRC_DISPATCH_PREFIX_CACHE_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "src/dispatch/page_allocator.h"
#include "src/dispatch/sequence_pages.h"
#include "src/dispatch/state_slot.h"

namespace weft::dispatch {

class PrefixCache {
 public:
  struct Prefix {
    std::vector<PageId> pages;
    std::optional<StateId> state;  // None without states or pages.
    // The tokens of the cached pages that agree, if they are more than those of
    // `pages` and other tokens follow them in the cache. Else 0. Further
    // sequences may leave the cached ones here, so a state here is of use.
    int64_t fork_tokens = 0;
  };

  // `page_size` is the number of tokens in a page, >= 1. `states` allocates
  // slots; it is null if the model has no states. Both outlive the cache.
  PrefixCache(PageAllocator* allocator, int32_t page_size,
              PageAllocator* states = nullptr);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // Returns the longest cached prefix of `tokens`; only full pages count. The
  // caller must share the pages and the state before it allocates, evicts or
  // drops any. A `version` must never be reused for other weights while the
  // cache exists.
  Prefix Lookup(uint64_t version, absl::Span<const int32_t> tokens);

  // Adds the full pages of `tokens`, which are the first tokens of `sequence`.
  // If a page with the same version and prefix is already cached, `sequence`
  // uses that page from now on. So a sequence that uses a cached page also uses
  // the cached pages of all earlier tokens.
  void Insert(uint64_t version, absl::Span<const int32_t> tokens,
              SequencePages& sequence);

  // Returns whether the pages of `tokens` are cached without the state after
  // the last of them. Only whole pages of tokens, >= 1, have a state.
  bool LacksState(uint64_t version, absl::Span<const int32_t> tokens);
  // Keeps the slot of this state, which is in use. REQUIRES: LacksState.
  void InsertState(uint64_t version, absl::Span<const int32_t> tokens,
                   StateId state);

  // Frees up to `count` pages that no sequence uses. Returns how many it freed.
  int64_t Evict(int64_t count);
  // Frees the least recently used state that no sequence uses. Returns whether
  // there was one.
  bool EvictState();
  // Forgets a state that one sequence uses, which may then change it. Returns
  // false if the cache has no such state.
  bool GiveState(StateId state);

  // Removes all pages of a version. A page in use becomes free when its last
  // user releases it.
  void DropVersion(uint64_t version);

  int64_t num_pages() const { return num_pages_; }

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
    std::optional<StateId> state;
    uint64_t state_used = 0;
  };

  Key KeyOf(const Entry* parent, absl::Span<const int32_t> tokens,
            size_t page) const;
  // Returns the entries of the cached pages that agree with `tokens`, from the
  // first on.
  std::vector<Entry*> Path(uint64_t version, absl::Span<const int32_t> tokens);
  // Marks all entries from the first page to `last` as used now. Does nothing
  // if `last` is null.
  void Touch(Entry* last);
  void TouchState(Entry& entry);
  void DropState(Entry& entry);
  void Remove(Entry* leaf);

  PageAllocator* const allocator_;
  const int32_t page_size_;
  PageAllocator* const states_;  // May be null.
  std::map<uint64_t, std::map<Key, Entry>> versions_;
  // Entries without children, by their last use. A use marks one path, and a
  // path has at most one leaf, so no two leaves have the same `last_used`.
  std::map<uint64_t, Entry*> leaves_;
  std::map<uint64_t, Entry*> with_state_;  // By the state's last use.
  uint64_t now_ = 0;  // The number of uses so far, which serves as the time.
  uint64_t next_id_ = 1;
  int64_t num_pages_ = 0;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_PREFIX_CACHE_H_
