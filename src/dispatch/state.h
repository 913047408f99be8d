// The state that the dispatcher's lock guards, and the operations that the
// dispatcher's desks share. Code outside this folder uses dispatcher.h.
#ifndef WEFT_SRC_DISPATCH_STATE_H_
#define WEFT_SRC_DISPATCH_STATE_H_

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "src/base/clock.h"
#include "src/base/threads/mutex.h"
#include "src/dispatch/dispatch_metrics.h"
#include "src/dispatch/entries.h"
#include "src/dispatch/residency.h"
#include "src/dispatch/scheduler.h"
#include "src/dispatch/work.h"

namespace weft::dispatch {

struct Options {
  SchedulerOptions scheduler;
  ResidencyOptions residency;
  int max_adapters = 0;
  int max_adapters_per_tenant = 0;
  uint64_t max_adapter_bytes_per_tenant = 0;  // 0: no limit.
  int64_t max_stored_reply_bytes = 0;
  bool records_steps = false;  // True with --state-dir. Requires post_durable.
};

// What the dispatcher uses but does not own. Everything here outlives the
// dispatcher.
struct Environment {
  const Clock* clock = nullptr;
  // Runs tasks in order on the reply thread. Any thread may call post_reply,
  // with or without the dispatcher's lock.
  std::function<void(std::function<void()>)> post_reply;
  // Runs tasks in order on the reply thread. A task runs when everything that
  // the engine thread recorded before the task was posted is on disk. The
  // dispatcher posts results of steps here. If post_durable is empty, nothing
  // is recorded and post_reply is used instead.
  std::function<void(std::function<void()>)> post_durable = {};
  DispatchMetrics* metrics = nullptr;
  // Returns RESOURCE_EXHAUSTED if a new step cannot be recorded. If check_room
  // is empty, every step can be recorded.
  std::function<absl::Status()> check_room = {};
};

// Totals over the adapters of one tenant.
struct TenantAdapters {
  int count = 0;
  uint64_t bytes = 0;  // The sum of AdapterRecord::image_bytes.
};

struct State {
  State(const Options& options, Environment environment);

  // The dispatcher and its desks call the methods below with the lock held.

  absl::Status CheckOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Does what AdapterDesk::CheckReady does.
  absl::Status CheckReady(const std::string& id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Returns the adapter's key; for an empty id, the base model's key. Returns
  // none if there is no such adapter.
  std::optional<AdapterKey> KeyOf(const std::string& id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Returns the scheduler's key for work of `tenant` on `adapter`. Each tenant
  // has its own key for the base model, and with it its own turns and limits.
  AdapterKey SchedulersKey(AdapterKey adapter, const std::string& tenant)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Returns null for the base model and for an adapter that no longer exists.
  AdapterRecord* Find(AdapterKey adapter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  AdapterRecord* Find(const std::string& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Returns what clients see of an adapter. REQUIRES: the adapter exists.
  AdapterInfo InfoOf(AdapterKey adapter) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Asks for a device slot if the adapter has none. Call it when the adapter
  // has work.
  void WantAdapter(AdapterKey adapter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Queues a step under item.id, with the fields of `item` that follow from it:
  // adapter, teacher and `recorded`. Sets the step's number. Errors: those of
  // Scheduler::Enqueue.
  absl::Status Queue(std::unique_ptr<StepWork> work, WorkItem item)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  StepTask StartStep(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Returns a new epoch: the time in microseconds, or last_epoch + 1 if that is
  // greater.
  uint64_t NewEpoch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Ends work with an error. Does not remove the work from the scheduler.
  void Drop(uint64_t id, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Takes back work that waits, which then ends with this error: at once, or in
  // its turn if it is an accepted step. Returns false if it has started.
  bool Withdraw(uint64_t id, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  std::vector<EngineTask> TakeTasks(AdapterKey adapter)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void StoreReply(AdapterRecord& record, AdapterKey adapter, uint64_t step,
                  StepResultPtr result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Returns whether the log has the adapter's steps. False for null.
  bool IsRecorded(const AdapterRecord* record) const {
    return options.records_steps && record != nullptr &&
           record->info.durability == Durability::kStep;
  }
  // AddRecord adds a new adapter. RemoveRecord removes one that exists.
  AdapterRecord& AddRecord(AdapterKey adapter, const AdapterInfo& info,
                           bool hidden = false)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void RemoveRecord(AdapterKey adapter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Returns RESOURCE_EXHAUSTED if the tenant's adapters have all bytes that it
  // may have.
  absl::Status CheckBytes(const std::string& tenant) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void SetFacts(AdapterRecord& record, const AdapterFacts& facts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void ShowAdapters() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Numbers of adapters that the replay has not restored yet. CountRecovering
  // counts those of `tenant`, or all if `tenant` is null.
  struct Recovering {
    int made = 0;    // Adapters that exist; the replay may still remove them.
    int unmade = 0;  // Adapters that the replay will make.
  };
  Recovering CountRecovering(const std::string* tenant) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  const Options options;
  const Environment env;

  Mutex mu;
  CondVar changed;
  Scheduler scheduler ABSL_GUARDED_BY(mu);
  Residency residency ABSL_GUARDED_BY(mu);
  std::map<std::string, AdapterKey> keys ABSL_GUARDED_BY(mu);
  std::map<AdapterKey, AdapterRecord> adapters ABSL_GUARDED_BY(mu);
  // `tenants` is keyed by name. `resident_bytes` is the total over all
  // adapters.
  std::map<std::string, TenantAdapters> tenants ABSL_GUARDED_BY(mu);
  uint64_t resident_bytes ABSL_GUARDED_BY(mu) = 0;
  std::array<int, kNumDurabilities> by_durability ABSL_GUARDED_BY(mu) = {};
  std::unordered_map<uint64_t, std::unique_ptr<StepWork>> steps
      ABSL_GUARDED_BY(mu);
  std::unordered_map<uint64_t, std::unique_ptr<SampleWork>> samples
      ABSL_GUARDED_BY(mu);
  std::vector<uint64_t> cancelled_samples ABSL_GUARDED_BY(mu);
  StoredReplies replies ABSL_GUARDED_BY(mu);
  // The tasks of AdapterDesk::WhenSlot, by ticket.
  std::map<uint64_t, EngineTask> slot_tasks ABSL_GUARDED_BY(mu);
  std::deque<EngineTask> tasks ABSL_GUARDED_BY(mu);
  std::deque<RunTrain> later ABSL_GUARDED_BY(mu);  // Of StepDesk::RunLater.
  // The next part of the replay of the log; empty if there is none.
  EngineTask replay ABSL_GUARDED_BY(mu);
  // Adapters that the replay has not restored yet, or whose units are in
  // `held_units`: maps their ids to tenants.
  std::map<std::string, std::string> recovering ABSL_GUARDED_BY(mu);
  // The units of RecoveryDesk::Hold.
  std::set<std::string> held_units ABSL_GUARDED_BY(mu);
  std::vector<Callback<bool>> drain_waiters ABSL_GUARDED_BY(mu);
  uint64_t next_id ABSL_GUARDED_BY(mu) = 1;
  uint64_t next_key ABSL_GUARDED_BY(mu) = 1;
  // The scheduler's keys of the base model, by tenant.
  std::map<std::string, AdapterKey> base_models ABSL_GUARDED_BY(mu);
  uint64_t last_epoch ABSL_GUARDED_BY(mu) = 0;
  int64_t holds ABSL_GUARDED_BY(mu) = 0;
  int64_t late_holds ABSL_GUARDED_BY(mu) = 0;  // Those taken in a drain.
  bool draining ABSL_GUARDED_BY(mu) = false;
  bool finishing ABSL_GUARDED_BY(mu) = false;  // The process will end.
  bool stopping ABSL_GUARDED_BY(mu) = false;
  // The error given to Close; OK before Close.
  absl::Status closed ABSL_GUARDED_BY(mu);

 private:
  TeacherName TeacherOf(const TrainRequest& request) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void DropStep(std::unique_ptr<StepWork> work, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
};

// Returns the error "adapter_id: 'x' does not exist".
absl::Status NoSuchAdapter(const std::string& adapter_id);

// Returns the error for a call that must wait for the replay of the log.
absl::Status NotReady(absl::string_view what,
                      std::map<std::string, std::string> values);

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_STATE_H_
