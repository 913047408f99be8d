// The training requests, optimizer steps and other operations of one adapter
// (or of the base model), in the order in which they must run. The queue knows
// which item is next, whether that item may start, and which step number is
// free. scheduler.h has the rules. Barriers are the items that are not kTrain.
//
// An item waits or is on the device. A request that is too big for one
// micro-batch runs in slices of its data, and waits again between two slices.
// Threads: not thread-safe.
#ifndef WEFT_SRC_DISPATCH_ADAPTER_QUEUE_H_
#define WEFT_SRC_DISPATCH_ADAPTER_QUEUE_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/dispatch/scheduled_work.h"

namespace weft::dispatch {

class AdapterQueue {
 public:
  struct Entry {
    WorkItem item;           // item.step is the step number; 0: it has none.
    uint64_t arrival = 0;    // Unique over all adapters.
    bool automatic = false;  // The queue chose the step number.
    // Number of data that are done (kTrain), or of parts of a barrier.
    int64_t next_datum = 0;
    int64_t in_flight = 0;  // Number of data on the device (kTrain).

    bool barrier() const { return item.kind != WorkKind::kTrain; }
    int64_t prefix(int64_t datum) const {
      return item.datum_prefix.empty() ? 0 : item.datum_prefix[datum];
    }
    bool done_after_flight() const {
      return barrier() || next_datum + in_flight ==
                              static_cast<int64_t>(item.datum_tokens.size());
    }
  };

  // Work that starts on the device.
  struct Started {
    TrainSlice slice;    // For a barrier only work_id is set.
    int64_t tokens = 0;  // Cost with the first datum's prefix; >= 1.
  };

  // `name` is the adapter's name in error messages.
  AdapterQueue(AdapterKey key, std::string name, uint64_t last_step);

  // Returns the step number that `item` would get, or 0 if it gets none.
  // Errors: ALREADY_EXISTS (waiting or running work has the number, or the
  // number was applied before a lower number), FAILED_PRECONDITION (the number
  // is in the past).
  absl::StatusOr<uint64_t> NumberFor(const WorkItem& item) const;

  // Returns how far work with this number (0: it comes last) is ahead of the
  // lowest missing number. 0: no missing number keeps the work from running.
  uint64_t Ahead(uint64_t step) const;

  // Adds an item. `number` comes from NumberFor. item.tokens is the item's
  // cost.
  void Add(WorkItem item, uint64_t number, uint64_t arrival);

  // Returns the item that may start now, or null. A numbered item waits until
  // all lower numbers have started. Every item waits while a barrier is on the
  // device, and a barrier waits until nothing of the adapter is on the device.
  // An item does not start after its deadline, but an item between two slices
  // goes on. If an unnumbered Forward and another item may start, returns the
  // one that is between two slices, or else the one that arrived first.
  const Entry* Ready(absl::Time now) const;

  // Starts the ready item if it is a kTrain with this `backward`. A request of
  // at most `max_batch_tokens` starts as a whole, if it fits `room` tokens. A
  // larger request waits while other work of the adapter is on the device. Then
  // it starts with the data that fit, or with at least one datum if `take_any`.
  // Returns none if nothing starts. Data with a common prefix may exceed `room`
  // if the excess costs no more than running the prefix again.
  std::optional<Started> StartTrain(absl::Time now, bool backward, int64_t room,
                                    int64_t max_batch_tokens, bool take_any);

  // Starts the ready item. REQUIRES: it is a barrier.
  Started StartBarrier();

  // Ends the part of work `id` that is on the device: a barrier, a part of it,
  // after which it has `more`, or a slice. Returns true if the work is over:
  // `ok` is false, or nothing is left. Ignores work that is not on the device.
  bool Finish(uint64_t id, bool ok, bool more);

  // Removes work that has not started and is not accepted (scheduler.h,
  // Numbers). Returns false if there is no such work.
  bool Remove(uint64_t id);

  // Makes accepted work that has not started an empty barrier in the same
  // place. Returns false if there is no such work.
  bool Empty(uint64_t id);

  // Continues after this step, which a replay of the log has restored.
  // REQUIRES: no work waits.
  void SkipTo(uint64_t step);

  // Returns the ids of the work that cannot finish if the adapter is removed:
  // all work except a barrier on the device and a request whose last slice is
  // on the device.
  std::vector<uint64_t> Unfinishable() const;

  AdapterKey key() const { return key_; }
  bool on_device() const { return !running_.empty(); }
  bool has_waiting() const { return !waiting_.empty() || !unnumbered_.empty(); }
  // Returns whether a request is between two slices.
  bool has_started() const {
    const auto started = [](const auto& line) {
      return !line.empty() && line.begin()->second.next_datum > 0;
    };
    return started(waiting_) || started(unnumbered_);
  }
  // Returns the last step that has ended, with none open below it.
  uint64_t last_step() const { return last_step_; }
  // Returns the lowest number that no work has. All work below it is accepted.
  uint64_t next_step() const { return missing_; }

 private:
  // A place in the order of execution. Work without a step number comes after
  // the highest number that was accepted before it arrived.
  struct Place {
    uint64_t number = 0;
    uint64_t after = 0;  // Entry::arrival if work has no number; otherwise 0.
    friend auto operator<=>(const Place&, const Place&) = default;
  };
  struct Running {
    Place place;
    Entry entry;
  };

  const Entry* ReadyInOrder(absl::Time now) const;
  const Entry* ReadyUnnumbered(absl::Time now) const;
  // Removes `ready`, which Ready returned, from the waiting work.
  Running TakeReady(const Entry& ready);
  bool Taken(uint64_t number) const;
  uint64_t HighestTaken() const;
  void SkipTaken();  // Raises missing_ to the lowest number that is not taken.
  void Apply(uint64_t number);
  Started StartData(const Entry& ready, int64_t num_data);
  void PutWaiting(const Place& place, Entry entry);

  const AdapterKey key_;
  const std::string name_;
  uint64_t last_step_;
  uint64_t missing_;  // The lowest number that is not taken.
  // Step numbers above a missing number that were applied or skipped.
  std::set<uint64_t> applied_ahead_;
  std::map<Place, Entry> waiting_;            // Waiting work in order of Place.
  std::map<uint64_t, Entry> unnumbered_;      // Unnumbered work, by arrival.
  std::map<uint64_t, Place> waiting_places_;  // Places of waiting work, by id.
  std::vector<Running> running_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_ADAPTER_QUEUE_H_
