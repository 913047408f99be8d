// Chooses what a full store evicts when its owners share one limit.
#ifndef WEFT_SRC_BASE_FAIR_EVICTION_H_
#define WEFT_SRC_BASE_FAIR_EVICTION_H_

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <utility>

namespace weft {

// The owner with the most bytes loses its oldest entry first. So no owner below
// its share loses one. The store keeps the entries themselves, and `T` says
// which one an entry is. With Renew the order of an owner is least recently
// used; without, first in first out.
// Add takes time logarithmic in the owners, Victim linear; the others take
// constant time. Threads: not thread-safe.
template <typename T>
class FairEviction {
 public:
  struct Entry {
    T value;
    int64_t bytes = 0;
  };
  struct Account {
    std::list<Entry> entries;  // The oldest first.
    int64_t bytes = 0;
  };
  using Accounts = std::map<std::string, Account>;

  // Where an entry is. Valid until the entry is removed.
  class Place {
   public:
    const T& value() const { return entry_->value; }

   private:
    friend class FairEviction;
    typename Accounts::iterator account_;
    typename std::list<Entry>::iterator entry_;
  };

  // Adds the newest entry of an owner.
  Place Add(const std::string& owner, T value, int64_t bytes) {
    Place place;
    place.account_ = accounts_.try_emplace(owner).first;
    Account& account = place.account_->second;
    place.entry_ = account.entries.insert(account.entries.end(),
                                          {std::move(value), bytes});
    account.bytes += bytes;
    bytes_ += bytes;
    return place;
  }
  // Makes an entry the newest of its owner.
  void Renew(const Place& place) {
    std::list<Entry>& entries = place.account_->second.entries;
    entries.splice(entries.end(), entries, place.entry_);
  }
  T Remove(const Place& place) {
    Account& account = place.account_->second;
    T value = std::move(place.entry_->value);
    account.bytes -= place.entry_->bytes;
    bytes_ -= place.entry_->bytes;
    account.entries.erase(place.entry_);
    if (account.entries.empty()) accounts_.erase(place.account_);
    return value;
  }
  // Returns the entry to evict. REQUIRES: there is an entry.
  Place Victim() {
    Place place;
    place.account_ = std::ranges::max_element(
        accounts_, {},
        [](const auto& account) { return account.second.bytes; });
    place.entry_ = place.account_->second.entries.begin();
    return place;
  }

  // Returns the owners that have entries.
  const Accounts& accounts() const { return accounts_; }
  // Returns the bytes of all entries.
  int64_t bytes() const { return bytes_; }

 private:
  Accounts accounts_;
  int64_t bytes_ = 0;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_FAIR_EVICTION_H_
