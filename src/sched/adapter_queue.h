// Training work of one adapter in the order in which it must run. Knows which
// item is next, whether it may start, and the next number. scheduler.h has the
// rules.
//
// An item waits or is on the device. A request too big for one micro-batch
// waits again between two slices, with its first data done. Threads: not
// thread-safe.
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
    WorkItem item;           // item.step is its number, 0 when it has none.
    uint64_t arrival = 0;    // Unique over all adapters.
    bool automatic = false;  // This queue chose the number.
    int64_t next_datum = 0;  // Earlier data are done; > 0: started.
    int64_t in_flight = 0;   // Data on the device now (kTrain).

    [[nodiscard]] bool barrier() const { return item.kind != WorkKind::kTrain; }
    [[nodiscard]] int64_t prefix(int64_t datum) const {
      return item.datum_prefix.empty() ? 0 : item.datum_prefix[datum];
    }
    [[nodiscard]] bool done_after_flight() const {
      return barrier() || next_datum + in_flight ==
                              static_cast<int64_t>(item.datum_tokens.size());
    }
  };

  // What SetLastStep did to waiting work.
  struct StepChange {
    std::vector<uint64_t> dropped;  // Ids whose number is now in the past.
    // (id, new number) of work whose number this queue had chosen.
    std::vector<std::pair<uint64_t, uint64_t>> renumbered;
  };

  // Work that goes to the device.
  struct Started {
    TrainSlice slice;    // A barrier has only a work_id.
    int64_t tokens = 0;  // Cost, prefixes included; >= 1.
  };

  // `name` is for messages.
  AdapterQueue(AdapterKey key, std::string name, uint64_t last_step,
               uint64_t reorder_window);

  // Returns the number that `item` would get. Errors: those of
  // Scheduler::Enqueue about its step.
  [[nodiscard]] absl::StatusOr<uint64_t> NumberFor(const WorkItem& item) const;

  // Adds an item; `number` is what NumberFor returned. item.tokens is its cost.
  void Add(WorkItem item, uint64_t number, uint64_t arrival);

  // Returns the item that may start now, or null. No number before it is
  // missing, its deadline is after `now` and, if it is a barrier, all before it
  // is finished. If an unnumbered item and one in order may both start, returns
  // the one that has started, or else the one that arrived first.
  [[nodiscard]] const Entry* Ready(absl::Time now) const;

  // Starts the ready kTrain item if it has the given `backward`. Takes the
  // whole request if it fits `room` tokens. If the request exceeds a
  // micro-batch (`max_batch_tokens`), takes the data that fit, and at least one
  // if `take_any`. Returns none if nothing fits. Data with a common prefix may
  // exceed `room` if that costs less than running the prefix again.
  std::optional<Started> StartTrain(absl::Time now, bool backward, int64_t room,
                                    int64_t max_batch_tokens, bool take_any);

  // Starts the ready barrier.
  Started StartBarrier();

  // Returns true when the work is over: its last slice ran, or it failed.
  bool Finish(uint64_t id, bool ok);

  // Removes work that has not started. Returns false if there is none of this
  // id.
  bool RemoveWaiting(uint64_t id);

  StepChange SetLastStep(uint64_t last_step);

  // Returns the ids of the work that RemoveAdapter cancels: all work except
  // that whose last slice is on the device.
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
  // Sorts by number. An unnumbered op comes after the highest number that was
  // accepted before it arrived.
  struct Place {
    uint64_t number = 0;
    uint64_t after = 0;  // Arrival of unnumbered work, 0 for numbered.
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  struct Running {
    Place place;
    Entry entry;
  };

  [[nodiscard]] const Entry* ReadyInOrder(absl::Time now) const;
  [[nodiscard]] const Entry* ReadyUnnumbered(absl::Time now) const;
  // Takes what Ready returned out of its line.
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
  std::set<uint64_t> applied_ahead_;      // Applied or skipped, above a gap.
  std::map<Place, Entry> waiting_;        // In order.
  std::map<uint64_t, Entry> unnumbered_;  // By arrival.
  std::map<uint64_t, Place> waiting_places_;  // Places of waiting work, by id.
  std::vector<Running> running_;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_ADAPTER_QUEUE_H_
