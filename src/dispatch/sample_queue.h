// Sample requests that wait for decoding. Each adapter's requests are first in,
// first out. Tenants and adapters take turns by the tokens that they were
// charged (fair_shares.h). Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_SAMPLE_QUEUE_H_
#define WEFT_SRC_DISPATCH_SAMPLE_QUEUE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "src/dispatch/fair_shares.h"

namespace weft::dispatch {

class SampleQueue {
 public:
  struct Entry {
    uint64_t id = 0;
    AdapterKey adapter = AdapterKey::kBaseModel;
    int64_t tokens = 0;  // WorkItem::tokens, the cost.
    absl::Time deadline;
    uint64_t arrival = 0;  // Unique; orders the adapter's requests.
  };

  // `weights` maps tenants to weights (see FairShares).
  explicit SampleQueue(std::map<std::string, int64_t> weights)
      : shares_(std::move(weights)) {}

  // Adds an adapter. An entry's adapter must be added before the entry.
  void AddAdapter(AdapterKey adapter, const std::string& tenant);

  // Removes the adapter with its entries and returns their ids.
  std::vector<uint64_t> RemoveAdapter(AdapterKey adapter);

  void Add(Entry entry);

  // Sets whether the adapter is held. Entries of a held adapter get no turn.
  void SetHeld(AdapterKey adapter, bool held);

  // Removes and returns the entry whose turn it is; none if there is no such
  // entry. Skips expired entries, held adapters and the tenants `without`.
  std::optional<Entry> Take(absl::Time now,
                            const std::set<std::string>& without);

  // Puts an entry that Take returned back at its old place.
  void PutBack(Entry entry);

  // Removes the adapter's entry that arrived as the `arrival`th.
  void Remove(AdapterKey adapter, uint64_t arrival);

  // Returns whether Take would return an entry of some tenant.
  bool HasReady(absl::Time now) const;
  bool HasWaiting(AdapterKey adapter) const;

 private:
  using Lane = std::map<uint64_t, Entry>;  // Entries by arrival.

  // Returns the first entry that has not expired, or end().
  static Lane::const_iterator Head(const Lane& lane, absl::Time now);
  void Erase(AdapterKey adapter, Lane::const_iterator entry);

  std::map<AdapterKey, Lane> lanes_;  // Only for adapters that have entries.
  std::set<AdapterKey> held_;
  FairShares shares_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_SAMPLE_QUEUE_H_
