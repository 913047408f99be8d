// The training work of one adapter, in the order in which it must run. The
// queue knows which item is next, whether it may start, and the next number.
// scheduler.h has the rules.
//
// An item waits or is on the device. A request that is too big for one
// micro-batch waits again between two slices, when its first data are done.
// Threads: not thread-safe.
#ifndef WEFT_SRC_SCHED_ADAPTER_QUEUE_H_
#define WEFT_SRC_SCHED_ADAPTER_QUEUE_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/sched/work.h"

namespace weft::sched {

class AdapterQueue {
 public:
  struct Entry {
    WorkItem item;           // item.step is the work's number, or 0 if the work
                             // has none.
    uint64_t arrival = 0;    // Unique over all adapters.
    bool automatic = false;  // The queue chose the number.
    int64_t next_datum = 0;  // All data before this one are done. If > 0, the
                             // work has started.
    int64_t in_flight = 0;   // Number of data on the device (kTrain).

    [[nodiscard]] bool barrier() const { return item.kind != WorkKind::kTrain; }
    [[nodiscard]] int64_t prefix(int64_t datum) const {
      return item.datum_prefix.empty() ? 0 : item.datum_prefix[datum];
    }
    [[nodiscard]] bool done_after_flight() const {
      return barrier() || next_datum + in_flight ==
                              static_cast<int64_t>(item.datum_tokens.size());
    }
  };

  // The changes that SetLastStep made to waiting work.
  struct StepChange {
    std::vector<uint64_t> dropped;  // Ids whose number is not free any more.
    // (id, new number) of work whose number the queue had chosen.
    std::vector<std::pair<uint64_t, uint64_t>> renumbered;
  };

  // Work that starts on the device.
  struct Started {
    TrainSlice slice;    // For a barrier only work_id is set.
    int64_t tokens = 0;  // Cost with prefixes; >= 1.
  };

  // Messages use `name`.
  AdapterQueue(AdapterKey key, std::string name, uint64_t last_step,
               uint64_t reorder_window);

  // Returns the number that `item` would get. Errors: those of
  // Scheduler::Enqueue about the step.
  [[nodiscard]] absl::StatusOr<uint64_t> NumberFor(const WorkItem& item) const;

  // Adds an item. `number` comes from NumberFor. item.tokens is the item's
  // cost.
  void Add(WorkItem item, uint64_t number, uint64_t arrival);

  // Returns the item that may start now, or null. An item may start if no
  // number before it is missing and its deadline is after `now`. A barrier also
  // waits until all work before it is finished. If both an unnumbered item and
  // a numbered one may start, returns the one that has started, or else the one
  // that arrived first.
  [[nodiscard]] const Entry* Ready(absl::Time now) const;

  // Starts the ready kTrain item if it has the given `backward`. Takes the
  // whole request if it fits `room` tokens. If the request exceeds a
  // micro-batch (`max_batch_tokens`), takes the data that fit, and at least one
  // if `take_any`. Returns none if nothing fits. Data with a common prefix may
  // exceed `room` if that costs less than running the prefix again.
  std::optional<Started> StartTrain(absl::Time now, bool backward, int64_t room,
                                    int64_t max_batch_tokens, bool take_any);

  // Starts the barrier that is ready.
  Started StartBarrier();

  // Returns true if the work is over: its last slice ran, or it failed.
  bool Finish(uint64_t id, bool ok);

  // Removes work that has not started. Returns false if there is no such work.
  bool RemoveWaiting(uint64_t id);

  StepChange SetLastStep(uint64_t last_step);

  // Returns the ids of the work that RemoveAdapter cancels: all work except
  // work whose last slice is on the device.
  [[nodiscard]] std::vector<uint64_t> Unfinishable() const;

  [[nodiscard]] AdapterKey key() const { return key_; }
  [[nodiscard]] bool on_device() const { return !running_.empty(); }
  [[nodiscard]] bool has_waiting() const {
    return !waiting_.empty() || !unnumbered_.empty();
  }
  // Returns whether the first request is between two slices.
  [[nodiscard]] bool has_started() const {
    const auto started = [](const auto& line) {
      return !line.empty() && line.begin()->second.next_datum > 0;
    };
    return started(waiting_) || started(unnumbered_);
  }
  [[nodiscard]] uint64_t last_step() const { return last_step_; }

 private:
  // Sorts by number. An unnumbered operation comes after the highest number
  // that was accepted before it arrived.
  struct Place {
    uint64_t number = 0;
    uint64_t after = 0;  // Arrival if unnumbered; otherwise 0.
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  struct Running {
    Place place;
    Entry entry;
  };

  [[nodiscard]] const Entry* ReadyInOrder(absl::Time now) const;
  [[nodiscard]] const Entry* ReadyUnnumbered(absl::Time now) const;
  // Removes the item that Ready returned from its queue.
  [[nodiscard]] Running TakeReady(const Entry& ready);
  [[nodiscard]] bool Taken(uint64_t number) const;
  [[nodiscard]] uint64_t HighestAccepted() const;
  [[nodiscard]] uint64_t LowestFree() const;
  // Frees or skips the number of removed work.
  void Release(const Entry& entry);
  void Apply(uint64_t number);
  Started StartData(const Entry& ready, int64_t num_data);
  void PutWaiting(const Place& place, Entry entry);

  const AdapterKey key_;
  const std::string name_;
  const uint64_t reorder_window_;
  uint64_t last_step_;
  std::set<uint64_t> applied_ahead_;          // Numbers above a gap that were
                                              // applied or skipped.
  std::map<Place, Entry> waiting_;            // Waiting work, in its order of
                                              // execution.
  std::map<uint64_t, Entry> unnumbered_;      // Keys: arrival.
  std::map<uint64_t, Place> waiting_places_;  // Places of waiting work, by id.
  std::vector<Running> running_;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_ADAPTER_QUEUE_H_
