#include "src/dispatch/prefix_cache.h"

#include <utility>

namespace weft::kv {

PrefixCache::PrefixCache(PageAllocator* allocator, int32_t page_size)
    : allocator_(allocator), page_size_(page_size) {}

PrefixCache::~PrefixCache() {
  while (!versions_.empty()) DropVersion(versions_.begin()->first);
}

PrefixCache::Key PrefixCache::KeyOf(const Entry* parent,
                                    absl::Span<const int32_t> tokens,
                                    size_t page) const {
  const auto part = tokens.subspan(page * page_size_, page_size_);
  return {.parent = parent == nullptr ? 0 : parent->id,
          .tokens = {part.begin(), part.end()}};
}

std::vector<PageId> PrefixCache::Lookup(uint64_t version,
                                        absl::Span<const int32_t> tokens) {
  std::vector<PageId> pages;
  const auto entries = versions_.find(version);
  if (entries == versions_.end()) return pages;
  Entry* last = nullptr;
  const size_t num_full = tokens.size() / page_size_;
  for (size_t i = 0; i < num_full; ++i) {
    const auto found = entries->second.find(KeyOf(last, tokens, i));
    if (found == entries->second.end()) break;
    last = &found->second;
    pages.push_back(last->page);
  }
  Touch(last);
  return pages;
}

void PrefixCache::Insert(uint64_t version, absl::Span<const int32_t> tokens,
                         SequencePages& sequence) {
  const size_t num_full = tokens.size() / page_size_;
  if (num_full == 0) return;
  std::map<Key, Entry>& entries = versions_[version];
  Entry* last = nullptr;
  for (size_t i = 0; i < num_full; ++i) {
    const auto [it, is_new] = entries.try_emplace(KeyOf(last, tokens, i));
    Entry& entry = it->second;
    if (is_new) {
      const PageId page = sequence.pages()[i];
      allocator_->Keep(page);
      ++num_pages_;
      if (last != nullptr && last->num_children++ == 0) {
        leaves_.erase(last->last_used);
      }
      entry = {.id = next_id_++,
               .page = page,
               .version = version,
               .parent = last,
               .key = &it->first};
    } else if (entry.page != sequence.pages()[i]) {
      sequence.Exchange(i, entry.page);
    }
    last = &entry;
  }
  Touch(last);
}

void PrefixCache::Touch(Entry* last) {
  if (last == nullptr) return;
  ++now_;
  if (last->num_children == 0) {
    leaves_.erase(last->last_used);
    leaves_[now_] = last;
  }
  for (Entry* entry = last; entry != nullptr; entry = entry->parent) {
    entry->last_used = now_;
  }
}

int64_t PrefixCache::Evict(int64_t count) {
  int64_t evicted = 0;
  // A running sequence uses at most one leaf, so this loop skips few leaves.
  auto leaf = leaves_.begin();
  while (leaf != leaves_.end() && evicted < count) {
    const auto [last_used, entry] = *leaf;
    if (allocator_->IsIdle(entry->page)) {
      Remove(entry);
      ++evicted;
      // The parent of the evicted entry may now be a leaf, and even the next
      // leaf to evict.
      leaf = leaves_.lower_bound(last_used);
    } else {
      ++leaf;
    }
  }
  return evicted;
}

void PrefixCache::Remove(Entry* leaf) {
  leaves_.erase(leaf->last_used);
  if (leaf->parent != nullptr && --leaf->parent->num_children == 0) {
    leaves_[leaf->parent->last_used] = leaf->parent;
  }
  allocator_->Forget(leaf->page);
  --num_pages_;
  const auto entries = versions_.find(leaf->version);
  entries->second.erase(entries->second.find(*leaf->key));
  if (entries->second.empty()) versions_.erase(entries);
}

void PrefixCache::DropVersion(uint64_t version) {
  const auto entries = versions_.find(version);
  if (entries == versions_.end()) return;
  for (const auto& [key, entry] : entries->second) {
    if (entry.num_children == 0) leaves_.erase(entry.last_used);
    allocator_->Forget(entry.page);
    --num_pages_;
  }
  versions_.erase(entries);
}

}  // namespace weft::kv
