// Decides what the device does next: which training requests share a
// micro-batch, which step runs alone, and when decoding runs.
//
// Order. Numbered work of an adapter runs in the order of its numbers. Work
// behind a gap waits for the missing number. kTrain, kOptim and loads without a
// number get the number after the highest taken one. Other kAdapterOp without a
// number run after all numbered work that came before them. kOptim and
// kAdapterOp are barriers: no other step of their adapter is on the device with
// them.
// Unnumbered Forwards and training work on the base model have no such order:
// they run by arrival and do not wait for gaps. No other step of the adapter
// runs between two slices of a request.
//
// Numbers. Numbered work is accepted when all lower numbers are taken. Then it
// keeps its number, also if it fails: accepted work that can no longer run, for
// example because its deadline has passed, is emptied. Work behind a gap is not
// accepted. If it is removed, its number is free again.
//
// Teachers. The weights of a held teacher take memory for a micro-batch, and on
// the host until a request of several slices ends. So a micro-batch has at most
// one held teacher, and while a request that began with one is between two
// slices, no other such request begins.
//
// Fairness. Tenants share training by tokens, in proportion to their weights. A
// step that runs alone costs as many tokens as a micro-batch has in its time.
// The adapters of one tenant share equally. The same holds for sampling
// (fair_shares.h). Training and decoding share device time by
// SchedulerOptions::sampling_share. A small batch waits briefly for others
// (BatchWindow).
//
// A deterministic state machine without clock and threads. Not thread-safe.
#ifndef WEFT_SRC_DISPATCH_SCHEDULER_H_
#define WEFT_SRC_DISPATCH_SCHEDULER_H_

#include <array>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/dispatch/adapter_queue.h"
#include "src/dispatch/batch_planner.h"
#include "src/dispatch/fair_shares.h"
#include "src/dispatch/sample_queue.h"
#include "src/dispatch/scheduled_work.h"

namespace weft::dispatch {

// The limits and weights of the scheduler.
struct SchedulerOptions {
  int64_t max_batch_tokens = 0;  // A larger single datum still runs.
  double sampling_share = 0;     // In (0, 1).
  // Weights >= 1. A tenant that is not named has weight 1.
  std::map<std::string, int64_t> tenant_weights = {};
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerOptions& options);

  // Adds an adapter. `name` is for messages. The next number is
  // `last_step` + 1. If the adapter is known, returns false and changes
  // nothing. The base model always exists; its tenant is "".
  bool AddAdapter(AdapterKey adapter, const std::string& name,
                  const std::string& tenant, uint64_t last_step);

  // Removes the adapter. Later Finished calls for its work do nothing. Returns
  // the ids of cancelled work: waiting samples, and steps unless their last
  // part is on the device.
  std::vector<uint64_t> RemoveAdapter(AdapterKey adapter);

  // Call it when a replay of the log has restored a step. The next number is
  // above it. REQUIRES: no work of the adapter waits.
  void SkipTo(AdapterKey adapter, uint64_t step);

  // Returns the last step that has ended, with none open below it; 0 if there
  // is no such adapter.
  uint64_t LastStep(AdapterKey adapter) const;
  // Returns the lowest number that no work has; 0 if there is no such adapter.
  uint64_t NextStep(AdapterKey adapter) const;
  // Returns AdapterQueue::Ahead; 0 if there is no such adapter.
  uint64_t Ahead(AdapterKey adapter, uint64_t step) const;

  // Sets whether the adapter is held. Of a held adapter only empty work starts.
  void SetHeld(AdapterKey adapter, bool held);

  // While set, no request starts that would be divided into slices. All other
  // work goes on, and so do requests that are between two slices.
  void SetUndividedOnly(bool only) { undivided_only_ = only; }

  // Returns the kinds of work that could start if the adapter were not held,
  // without empty work.
  WorkKinds ReadyKinds(AdapterKey adapter) const;

  // Returns whether a step of the adapter is on the device or between slices.
  bool IsRunning(AdapterKey adapter) const;

  // Returns all work of the adapter that has not started, the latest first.
  std::vector<uint64_t> WaitingOf(AdapterKey adapter) const;

  // Queues work. Returns its step number; 0 if it has none. An error changes
  // nothing. Errors: NOT_FOUND (adapter), ALREADY_EXISTS (number in use, or
  // applied before a lower one), FAILED_PRECONDITION (number <= LastStep),
  // DEADLINE_EXCEEDED, INVALID_ARGUMENT (malformed item, id in use).
  absl::StatusOr<uint64_t> Enqueue(WorkItem item, absl::Time now);

  // Removes waiting work that is not accepted. Returns false if there is none.
  bool Remove(uint64_t id);
  // Makes accepted work that waits empty. It still ends with Finished. Returns
  // false if there is no such work.
  bool Empty(uint64_t id);

  // Returns waiting work whose deadline has passed. Remove or empty it.
  std::vector<uint64_t> Expired(absl::Time now) const;

  // Returns the earliest deadline of waiting work, or InfiniteFuture.
  absl::Time NextDeadline() const;

  // Returns the next plan and starts its work. Expired work never starts. No
  // step starts on an adapter that has a step on the device. `active_decodes`
  // is the number of sample requests in prefill or decode.
  Plan Next(absl::Time now, int active_decodes);

  // Removes up to `max` sample requests from the queue and returns their ids,
  // in the order of SampleQueue::Take. Passes over the tenants `without`.
  std::vector<uint64_t> TakeSamples(absl::Time now, int max,
                                    const std::set<std::string>& without = {});

  // Puts a sample back at its old place in the queue. Returns false if the
  // latest TakeSamples did not return it, or its adapter is gone.
  bool PutBack(uint64_t id);

  // Call it when a slice or a kExclusive plan ends. If `ok` is false, the whole
  // request has failed and its remaining slices are dropped. If a kExclusive
  // has `more` parts, it takes turns with the work of other adapters.
  void Finished(uint64_t work_id, bool ok, bool more = false);

  // Counts time of the running micro-batch that one adapter's work takes
  // besides its tokens, as the tokens that a micro-batch computes in this time.
  // Does nothing while none runs: what is replayed from the log is nobody's.
  void ChargeTime(AdapterKey adapter, absl::Duration elapsed);
  // Charges the device time of the latest plan to decoding or to training, as
  // `kind` says. The time of a kExclusive plan also counts for its tenant, as
  // the tokens that a micro-batch computes in this time.
  void AccountDeviceTime(Plan::Kind kind, absl::Duration elapsed);

  // Returns whether no work waits or is on the device. Ignores taken samples.
  bool Idle() const;
  // Returns the number of requests of this kind that have not started.
  int64_t QueueDepth(WorkKind kind) const;
  // Returns the number of the tenant's requests that have not started.
  int64_t QueueDepthOf(const std::string& tenant) const;
  const BatchWindow& batch_window() const { return window_; }
  const std::string& TenantOf(AdapterKey adapter) const;

 private:
  struct Queued {
    AdapterKey adapter = AdapterKey::kBaseModel;
    WorkKind kind = WorkKind::kTrain;
    absl::Time deadline;
    AdapterKey teacher = AdapterKey::kBaseModel;
    uint64_t arrival = 0;
    bool waiting = true;   // True until the work starts.
    bool emptied = false;  // Waits only for the end of its number.
  };

  // NoteWaiting adds waiting work, NoteLeft ends its wait, Forget removes it.
  void NoteWaiting(uint64_t id, Queued queued);
  void NoteLeft(uint64_t id);
  void Forget(uint64_t id);
  // Updates backlogged_ and shares_ after a change of the queue or of held_.
  void NoteBacklog(const AdapterQueue& queue);
  bool CanStart(const AdapterQueue& queue, absl::Time now) const;
  // Returns whether the next work may not start because it has several slices.
  bool MayNotDivide(const AdapterQueue::Entry& ready) const;

  const SchedulerOptions options_;
  std::map<AdapterKey, AdapterQueue> adapters_;
  std::set<AdapterKey> backlogged_;  // Adapters with waiting training work.
  FairShares shares_;                // Shares of training.
  std::set<AdapterKey> held_;
  bool undivided_only_ = false;
  // Requests of several slices that began when their teachers were held.
  std::set<uint64_t> taught_by_held_;
  AdapterKey exclusive_ = AdapterKey::kBaseModel;  // Of the latest kExclusive.
  // Of the running micro-batch, by ChargeTime; none while none runs.
  std::optional<absl::Duration> charged_time_;
  SampleQueue samples_;
  DeviceShare share_;
  BatchWindow window_;
  std::unordered_map<uint64_t, Queued> work_;  // Waiting or on the device.
  // The deadlines of waiting work.
  std::set<std::pair<absl::Time, uint64_t>> deadlines_;
  std::vector<SampleQueue::Entry> taken_;  // From the latest TakeSamples.
  std::array<int64_t, kNumWorkKinds> depth_{};
  // The waiting requests of each tenant that has any.
  std::map<std::string, int64_t> depth_of_;
  uint64_t arrivals_ = 0;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_SCHEDULER_H_
