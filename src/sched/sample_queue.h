// Sample requests that wait for a place among the decoding sequences: first in
// first out for each adapter, adapters in turn by the tokens they were given
// (start-time fair queueing).
// Threads: not thread-safe.
#ifndef WEFT_SRC_SCHED_SAMPLE_QUEUE_H_
#define WEFT_SRC_SCHED_SAMPLE_QUEUE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace weft::sched {

class SampleQueue {
 public:
  struct Entry {
    uint64_t id = 0;
    std::string adapter;
    int64_t tokens = 0;  // Cost.
    absl::Time deadline;
    uint64_t arrival = 0;  // Unique; the place in the adapter's line.
  };

  void Add(Entry entry);

  // Removes and returns the entry whose turn it is; expired ones have none, nor
  // have those of the adapters that are `held`.
  std::optional<Entry> Take(absl::Time now, const std::set<std::string>& held);

  // Undoes the Take of `entry`.
  void PutBack(Entry entry);

  bool Remove(const std::string& adapter, uint64_t id);

  // Removes the adapter's entries and returns their ids.
  std::vector<uint64_t> RemoveAdapter(const std::string& adapter);

  // Take would return something.
  [[nodiscard]] bool HasReady(absl::Time now,
                              const std::set<std::string>& held) const;
  [[nodiscard]] bool HasWaiting(const std::string& adapter) const;

 private:
  struct Lane {
    std::map<uint64_t, Entry> waiting;  // By arrival.
    int64_t virtual_time = 0;           // Tokens given.
  };

  // First entry of the lane that has not expired; end() when none.
  static std::map<uint64_t, Entry>::const_iterator Head(const Lane& lane,
                                                        absl::Time now);

  std::map<std::string, Lane> lanes_;
  int64_t virtual_time_ = 0;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_SAMPLE_QUEUE_H_
