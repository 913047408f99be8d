#include "src/dispatch/prefix_cache.h"

#include <algorithm>

namespace weft::dispatch {

PrefixCache::PrefixCache(PageAllocator* allocator, int32_t page_size,
                         PageAllocator* states)
    : allocator_(allocator), page_size_(page_size), states_(states) {}

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

std::vector<PrefixCache::Entry*> PrefixCache::Path(
    uint64_t version, absl::Span<const int32_t> tokens) {
  std::vector<Entry*> path;
  const auto entries = versions_.find(version);
  if (entries == versions_.end()) return path;
  const size_t num_full = tokens.size() / page_size_;
  for (size_t i = 0; i < num_full; ++i) {
    const auto found = entries->second.find(
        KeyOf(path.empty() ? nullptr : path.back(), tokens, i));
    if (found == entries->second.end()) break;
    path.push_back(&found->second);
  }
  return path;
}

PrefixCache::Prefix PrefixCache::Lookup(uint64_t version,
                                        absl::Span<const int32_t> tokens) {
  Prefix prefix;
  std::vector<Entry*> path = Path(version, tokens);
  if (path.empty()) return prefix;
  Touch(path.back());
  if (states_ != nullptr) {
    const size_t num_cached = path.size();
    const bool is_inner = path.back()->num_children > 0;
    while (!path.empty() && !path.back()->state.has_value()) path.pop_back();
    if (path.size() < num_cached && is_inner) {
      prefix.fork_tokens = static_cast<int64_t>(num_cached) * page_size_;
    }
    if (path.empty()) return prefix;
    TouchState(*path.back());
    prefix.state = path.back()->state;
  }
  for (const Entry* entry : path) prefix.pages.push_back(entry->page);
  return prefix;
}

bool PrefixCache::LacksState(uint64_t version,
                             absl::Span<const int32_t> tokens) {
  if (tokens.empty() || tokens.size() % page_size_ != 0) return false;
  const std::vector<Entry*> path = Path(version, tokens);
  return path.size() * page_size_ == tokens.size() &&
         !path.back()->state.has_value();
}

void PrefixCache::InsertState(uint64_t version,
                              absl::Span<const int32_t> tokens, StateId state) {
  Entry& entry = *Path(version, tokens).back();
  states_->Keep(state);
  entry.state = state;
  ++now_;
  TouchState(entry);
}

void PrefixCache::TouchState(Entry& entry) {
  with_state_.erase(entry.state_used);
  entry.state_used = now_;
  with_state_[now_] = &entry;
}

void PrefixCache::DropState(Entry& entry) {
  if (!entry.state.has_value()) return;
  with_state_.erase(entry.state_used);
  states_->Forget(*entry.state);
  entry.state.reset();
}

bool PrefixCache::EvictState() {
  const auto oldest = std::ranges::find_if(with_state_, [this](const auto& e) {
    return states_->IsIdle(*e.second->state);
  });
  if (oldest == with_state_.end()) return false;
  DropState(*oldest->second);
  return true;
}

bool PrefixCache::GiveState(StateId state) {
  const auto entry = std::ranges::find_if(
      with_state_, [&](const auto& e) { return e.second->state == state; });
  if (entry == with_state_.end() || states_->num_references(state) > 2) {
    return false;
  }
  DropState(*entry->second);
  return true;
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
  DropState(*leaf);
  allocator_->Forget(leaf->page);
  --num_pages_;
  const auto entries = versions_.find(leaf->version);
  entries->second.erase(entries->second.find(*leaf->key));
  if (entries->second.empty()) versions_.erase(entries);
}

void PrefixCache::DropVersion(uint64_t version) {
  const auto entries = versions_.find(version);
  if (entries == versions_.end()) return;
  for (auto& [key, entry] : entries->second) {
    if (entry.num_children == 0) leaves_.erase(entry.last_used);
    DropState(entry);
    allocator_->Forget(entry.page);
    --num_pages_;
  }
  versions_.erase(entries);
}

}  // namespace weft::dispatch
