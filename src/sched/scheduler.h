// Decides what the device does next: which training requests share a
// micro-batch, which step runs alone, and when decoding runs.
//
// Order. Numbered work of an adapter runs in number order from last_step + 1.
// Work behind a gap waits until the missing number arrives or the work expires.
// kTrain and kOptim without a number take the next one after the highest
// accepted. kAdapterOp without a number runs after everything accepted before
// it. kOptim and kAdapterOp are barriers: they start when all work before them
// has finished, and no work after them starts before they finish. Unnumbered
// kTrain and work on the base model have no order: they take turns by arrival,
// wait for no gap and are not interrupted by other work.
//
// Numbers. Work that fails or leaves the queue frees its number, so that the
// caller can send it again. If the scheduler chose the number and later work
// follows it, the number is skipped instead, because its caller does not know
// it and cannot fill the gap.
//
// Fairness. Tenants share training, by tokens, in proportion to their weights.
// The adapters of one tenant share equally. Samples are shared in the same way
// (fair_shares.h). queue_room.h limits what a tenant may queue. Training and
// decoding share device time by SchedulerOptions::sampling_share.
// A small batch waits briefly for others that train in step (batch_window.h).
//
// A deterministic state machine without clock and threads. Not thread-safe.
#ifndef WEFT_SRC_SCHED_SCHEDULER_H_
#define WEFT_SRC_SCHED_SCHEDULER_H_

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/sched/adapter_queue.h"
#include "src/sched/batch_window.h"
#include "src/sched/device_share.h"
#include "src/sched/fair_shares.h"
#include "src/sched/queue_room.h"
#include "src/sched/sample_queue.h"
#include "src/sched/work.h"

namespace weft::sched {

struct SchedulerOptions {
  int64_t max_batch_tokens = 8192;  // A larger single datum still runs.
  QueueLimits queue;                // Limits of waiting work of all kinds.
  double sampling_share = 0.5;      // In (0, 1).
  uint64_t reorder_window = 256;    // How far a step may run ahead; >= 1.
  // Weights >= 1. A tenant that is not named has weight 1.
  std::map<std::string, int64_t> tenant_weights = {};
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);

  // Adds an adapter. `name` is for messages. `last_step` is the last step in
  // the adapter's state. If the adapter is known, returns false and changes
  // nothing. The base model always exists; its tenant is "".
  bool AddAdapter(AdapterKey adapter, const std::string& name,
                  const std::string& tenant, uint64_t last_step);

  // Removes the adapter; Finished of its work is then ignored. Returns the ids
  // of work that will not run: all but that whose last slice is on the device.
  std::vector<uint64_t> RemoveAdapter(AdapterKey adapter);

  // Call it after a kAdapterOp replaced the adapter's state, and before
  // Finished. The next number is last_step + 1, whatever number the running
  // work had. Returns the waiting work that is removed and the work that got
  // another number.
  AdapterQueue::StepChange SetLastStep(AdapterKey adapter, uint64_t last_step);

  // Returns the step up to which all are applied; none for an unknown adapter.
  [[nodiscard]] std::optional<uint64_t> LastStep(AdapterKey adapter) const;

  // Holds the adapter or lets it go. Work of a held adapter does not start.
  void SetHeld(AdapterKey adapter, bool held);

  // While set, requests between slices continue but no other training starts.
  void SetFinishing(bool finishing) { finishing_ = finishing; }

  // Returns the work that could start if the adapter were not held.
  [[nodiscard]] WorkKinds ReadyKinds(AdapterKey adapter) const;

  // Returns whether training is on the device or between two slices.
  [[nodiscard]] bool IsRunning(AdapterKey adapter) const;

  // Cancels all work of the adapter that has not started. Returns its ids.
  std::vector<uint64_t> CancelWaiting(AdapterKey adapter);

  // Returns the number under which the work will run; 0 if it has none. An
  // error changes nothing: NOT_FOUND (adapter), ALREADY_EXISTS (number is
  // waiting, running, or applied ahead of a gap), FAILED_PRECONDITION (number
  // is in the past or beyond the reorder window; names the expected one),
  // RESOURCE_EXHAUSTED (names the limit), DEADLINE_EXCEEDED, INVALID_ARGUMENT
  // (malformed item).
  absl::StatusOr<uint64_t> Enqueue(WorkItem item, absl::Time now);

  // Removes waiting work. Returns false if it is unknown or has started.
  bool Cancel(uint64_t id);

  // Removes waiting work whose deadline has passed. Returns its ids.
  std::vector<uint64_t> TakeExpired(absl::Time now);

  // Returns when TakeExpired next has work to remove, or InfiniteFuture.
  [[nodiscard]] absl::Time NextDeadline() const;

  // Returns the next plan and starts its work. Expired work never starts. An
  // adapter with unfinished work on the device is in no further plan.
  // `active_decodes` is the number of sequences in decoding.
  Plan Next(absl::Time now, int active_decodes);

  // Removes and returns up to `max` sample requests, in an order that is fair
  // among adapters, and first in, first out for each adapter.
  std::vector<uint64_t> TakeSamples(absl::Time now, int max);

  // Puts a sample back at its old place if there is no room for it. Returns
  // false if the latest TakeSamples did not return it.
  bool PutBack(uint64_t id);

  // Call it once for each slice and kExclusive. If `ok` is false, the whole
  // request has failed and its remaining slices are dropped.
  void Finished(uint64_t work_id, bool ok);

  // Charges device time to training or sampling (kDecode).
  void AccountDeviceTime(Plan::Kind kind, absl::Duration elapsed);

  // Returns whether nothing waits or is on the device, except taken samples.
  [[nodiscard]] bool Idle() const;

  // Returns the number of requests that have not started.
  [[nodiscard]] int64_t QueueDepth(WorkKind kind) const;
  [[nodiscard]] const QueueRoom& room() const { return room_; }  // By tenant.
  [[nodiscard]] const BatchWindow& batch_window() const { return window_; }
  [[nodiscard]] const std::string& TenantOf(AdapterKey adapter) const;

 private:
  struct Queued {
    AdapterKey adapter = AdapterKey::kBaseModel;
    WorkKind kind = WorkKind::kTrain;
    int64_t held_tokens = 0;  // Tokens that count in the queue.
    absl::Time deadline;
    bool waiting = true;  // True until it starts.
  };

  // NoteWaiting counts work as waiting, NoteLeft stops that, Forget removes it.
  void NoteWaiting(uint64_t id, Queued queued);
  void NoteLeft(uint64_t id);
  void Forget(uint64_t id);
  // Updates what follows from the queue and its hold, after a change of either.
  void NoteBacklog(const AdapterQueue& queue);

  const SchedulerOptions options_;
  std::map<AdapterKey, AdapterQueue> adapters_;
  std::set<AdapterKey> backlogged_;  // Adapters with waiting training work.
  FairShares shares_;                // Shares of training.
  std::set<AdapterKey> held_;
  bool finishing_ = false;
  SampleQueue samples_;
  QueueRoom room_;
  DeviceShare share_;
  BatchWindow window_;
  std::unordered_map<uint64_t, Queued> work_;  // Waiting or on the device.
  // Deadlines of waiting work.
  std::set<std::pair<absl::Time, uint64_t>> deadlines_;
  std::vector<SampleQueue::Entry> taken_;  // The last TakeSamples.
  std::array<int64_t, kNumWorkKinds> depth_{};
  uint64_t arrivals_ = 0;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_SCHEDULER_H_
