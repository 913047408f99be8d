// Decides what the device does next: which training requests share a
// micro-batch, which optimizer step runs alone, when decoding gets its turn.
//
// Order. Numbered work of an adapter runs in number order from last_step + 1;
// a gap waits until the missing number arrives or the waiting work expires.
// kTrain and kOptim without a number take the next one after the highest
// accepted. kAdapterOp without a number takes none and runs after everything
// accepted before it. kOptim and kAdapterOp are barriers: they start when
// everything before them has finished, and nothing after them starts earlier
// than they finish. Work on the base model is not ordered.
//
// Numbers. Work that fails or leaves the queue frees its number, so that the
// caller can send it again. A number that the scheduler itself gave out and
// that later work already follows is skipped instead: its caller does not know
// it and could never fill the gap.
//
// Fairness. Tenants share training by tokens in proportion to their weights,
// the adapters of one tenant equally; samples likewise (fair_shares.h). How
// much a tenant may queue: queue_room.h. Training and decoding share device
// time by SchedulerOptions::sampling_share.
//
// A deterministic state machine: no clock and no threads of its own. Threads:
// not thread-safe; the dispatcher's lock guards it.
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
#include "src/sched/device_share.h"
#include "src/sched/fair_shares.h"
#include "src/sched/queue_room.h"
#include "src/sched/sample_queue.h"
#include "src/sched/work.h"

namespace weft::sched {

struct SchedulerOptions {
  int64_t max_batch_tokens = 8192;  // In a micro-batch; one datum may exceed.
  QueueLimits queue;                // Limits of waiting work of all kinds.
  double sampling_share = 0.5;      // Sampling's part of device time, (0, 1).
  uint64_t reorder_window = 256;    // Steps a number may run ahead; >= 1.
  // Shares of tenants, >= 1; every other tenant has 1.
  std::map<std::string, int64_t> tenant_weights = {};
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);

  // `name`: for messages. `last_step`: number of the last step that is part of
  // the adapter's state.
  // False when the adapter is known already (nothing changes). The base model
  // is there from the start; its tenant is "".
  bool AddAdapter(AdapterKey adapter, const std::string& name,
                  const std::string& tenant, uint64_t last_step);

  // Forgets the adapter. Returns the ids of its work that will not run, which
  // is everything but what is on the device in its last slice; later calls of
  // Finished for what was on the device are ignored.
  std::vector<uint64_t> RemoveAdapter(AdapterKey adapter);

  // After a kAdapterOp replaced the adapter's state (call it before Finished):
  // the next number is last_step + 1, whatever number the running work had.
  // Tells which waiting work is gone and which got another number.
  AdapterQueue::StepChange SetLastStep(AdapterKey adapter, uint64_t last_step);

  // Number of the last step up to which all are applied; none: unknown adapter.
  [[nodiscard]] std::optional<uint64_t> LastStep(AdapterKey adapter) const;

  // Held: work of the adapter waits as before, but none of it starts.
  void SetHeld(AdapterKey adapter, bool held);

  // While set, only requests between two slices go on; no training starts.
  void SetFinishing(bool finishing) { finishing_ = finishing; }

  // The kinds of the adapter's work that could start now if it were not held.
  [[nodiscard]] WorkKinds ReadyKinds(AdapterKey adapter) const;

  // Training work of the adapter is on the device or between two slices.
  [[nodiscard]] bool IsRunning(AdapterKey adapter) const;

  // Cancels all work of the adapter that has not started; returns its ids.
  std::vector<uint64_t> CancelWaiting(AdapterKey adapter);

  // Returns the number under which the work will run, 0 when it has none.
  // Errors, all of which leave the scheduler as it was: NOT_FOUND (adapter),
  // ALREADY_EXISTS (number is waiting, running, or applied ahead of a gap),
  // FAILED_PRECONDITION (number is in the past or beyond the reorder window;
  // names the expected one), RESOURCE_EXHAUSTED (names the limit),
  // DEADLINE_EXCEEDED, INVALID_ARGUMENT (malformed item).
  absl::StatusOr<uint64_t> Enqueue(WorkItem item, absl::Time now);

  // True: it was waiting and is gone. False: unknown, or started already.
  bool Cancel(uint64_t id);

  // Removes waiting work whose deadline is not after `now`; ids by deadline.
  std::vector<uint64_t> TakeExpired(absl::Time now);

  // When TakeExpired has something to do next; InfiniteFuture when never.
  [[nodiscard]] absl::Time NextDeadline() const;

  // Starts the work it returns; expired work is never started. An adapter
  // with unfinished work on the device gives nothing to a further plan.
  // `active_decodes`: sequences that are being decoded.
  Plan Next(absl::Time now, int active_decodes);

  // Sample requests to admit to decoding, at most `max`; fair over adapters,
  // first in first out for each. They leave the scheduler.
  std::vector<uint64_t> TakeSamples(absl::Time now, int max);

  // Gives back, to its old place, a sample of the latest TakeSamples for which
  // there is no room. False: `id` is not from there.
  bool PutBack(uint64_t id);

  // Call once for every slice of a plan and for every kExclusive. ok = false:
  // the whole request has failed and its remaining slices are dropped.
  void Finished(uint64_t work_id, bool ok);

  // Charges device time: kTrain and kExclusive to training, kDecode to
  // sampling.
  void AccountDeviceTime(Plan::Kind kind, absl::Duration elapsed);

  // Nothing waits and nothing is on the device (taken samples do not count).
  [[nodiscard]] bool Idle() const;

  // Requests that have not started.
  [[nodiscard]] int64_t QueueDepth(WorkKind kind) const;
  // The same by tenant, with their tokens.
  [[nodiscard]] const QueueRoom& room() const { return room_; }
  // The tenant of an adapter that was added.
  [[nodiscard]] const std::string& TenantOf(AdapterKey adapter) const;

 private:
  struct Queued {
    AdapterKey adapter = AdapterKey::kBaseModel;
    WorkKind kind = WorkKind::kTrain;
    int64_t tokens = 0;
    absl::Time deadline;
    bool waiting = true;  // Not started.
  };

  absl::Status CheckItem(const WorkItem& item, absl::Time now) const;
  // Counts work as waiting; stops counting it; and forgets it altogether.
  void NoteWaiting(uint64_t id, Queued queued);
  void NoteLeft(uint64_t id);
  void Forget(uint64_t id);
  // Call after every change of the queue.
  void NoteBacklog(const AdapterQueue& queue);

  const SchedulerOptions options_;
  std::map<AdapterKey, AdapterQueue> adapters_;
  std::set<AdapterKey> backlogged_;  // Adapters with waiting training work.
  FairShares shares_;                // The shares in training.
  std::set<AdapterKey> held_;
  bool finishing_ = false;
  SampleQueue samples_;
  QueueRoom room_;
  DeviceShare share_;
  std::unordered_map<uint64_t, Queued> work_;  // Waiting or on the device.
  std::set<std::pair<absl::Time, uint64_t>> deadlines_;  // For waiting work.
  std::vector<SampleQueue::Entry> taken_;  // By the last TakeSamples.
  std::array<int64_t, kNumWorkKinds> depth_{};
  uint64_t arrivals_ = 0;
};

}  // namespace weft::sched

#endif  // WEFT_SRC_SCHED_SCHEDULER_H_
