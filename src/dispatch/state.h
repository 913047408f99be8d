// What the dispatcher's lock guards, and what its desks do to it under that
// lock. Everybody outside of this folder uses dispatcher.h.
#ifndef WEFT_SRC_DISPATCH_STATE_H_
#define WEFT_SRC_DISPATCH_STATE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "src/base/clock.h"
#include "src/base/mutex.h"
#include "src/dispatch/dispatch_metrics.h"
#include "src/dispatch/replay_table.h"
#include "src/dispatch/stored_replies.h"
#include "src/dispatch/work.h"
#include "src/request/reply.h"
#include "src/sched/residency.h"
#include "src/sched/scheduler.h"

namespace weft::dispatch {

struct Options {
  sched::SchedulerOptions scheduler;
  sched::ResidencyOptions residency;
  int max_adapters = 1024;
  int max_adapters_per_tenant = 1024;
  int64_t max_stored_reply_bytes = int64_t{256} << 20;
  bool records_steps = false;  // What post_durable waits for, is on disk.
};

// What the dispatcher uses and does not own; all of it outlives the dispatcher.
struct Environment {
  const Clock* clock = nullptr;
  // Runs the task on the thread that sends replies, in order. Any thread, also
  // while the dispatcher's lock is held.
  std::function<void(std::function<void()>)> post_reply;
  // The same once all that the engine thread has recorded so far is on disk;
  // in order with itself. Replies of steps take this way. Empty: nothing is
  // recorded, as post_reply.
  std::function<void(std::function<void()>)> post_durable = {};
  DispatchMetrics* metrics = nullptr;
};

using StepCallback =
    std::function<void(absl::StatusOr<StepResultPtr>, bool replayed)>;

struct StepWork {
  // A caller of this step: the first one, or one that repeated it.
  struct Waiter {
    uint64_t id = 0;
    StepCallback done;
  };
  StepRequest request;  // Never changes.
  AdapterKey adapter = AdapterKey::kBaseModel;
  std::string digest;
  uint64_t step = 0;
  sched::WorkKind kind = sched::WorkKind::kTrain;
  absl::Time accepted_at;
  bool started = false;
  bool again = false;      // Runs as the log says; the scheduler has no part.
  bool cancelled = false;  // Nobody waits: it ends at its next slice.
  std::vector<Waiter> waiters;
};

struct SampleWork {
  SampleRequest request;  // Never changes.
  AdapterKey adapter = AdapterKey::kBaseModel;
  std::string tenant;
  absl::Time accepted_at;
  std::function<void(SampleDelta)> on_delta;  // May be empty.
  Callback<SampleResult> done;
};

// What the owner of an adapter's tensors says of it.
struct AdapterFacts {
  // All but adapter_id, tenant, last_step, durable_step and last_used_at, which
  // the dispatcher knows. The epoch only for one that begins.
  AdapterInfo info;
  uint64_t image_bytes = 0;  // What its tensors take off the device.
};

// The load that an adapter's present epoch began with. Its number belongs to the
// epoch before, and so a repeated call of it is found here.
struct LoadOrigin {
  uint64_t step = 0;
  std::string digest;
  StepResultPtr result;
};

// All that the dispatcher knows of an adapter, but for its place in the
// scheduler and in the residency policy, which have the same key.
struct AdapterRecord {
  AdapterInfo info;  // Without last_step, which the scheduler knows.
  uint64_t image_bytes = 0;
  ReplayTable replays;
  std::optional<LoadOrigin> origin;
  std::optional<absl::Time> wanted_at;  // Work has waited for it since.
  std::vector<EngineTask> tasks;        // Wait until it is on the device.
  bool pinned = false;                  // Does not leave the device.
};

struct State {
  State(const Options& options, Environment environment);

  // Shared by the desks. The lock is held.

  [[nodiscard]] absl::Status CheckOpen() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // The base model's key for an empty id; none: no such adapter.
  [[nodiscard]] std::optional<AdapterKey> KeyOf(const std::string& id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Null for the base model and for an adapter that is gone.
  [[nodiscard]] AdapterRecord* Find(AdapterKey adapter)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // What clients see of an adapter that exists.
  [[nodiscard]] AdapterInfo InfoOf(AdapterKey adapter) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // The adapter has work: brings it to the device if it is not there.
  void WantAdapter(AdapterKey adapter) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  [[nodiscard]] StepTask StartStep(uint64_t id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Names a new life of an adapter: greater than all before, also than those of
  // an earlier process.
  [[nodiscard]] uint64_t NewEpoch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Fails work that has left the scheduler without an end of its own.
  void Drop(uint64_t id, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  [[nodiscard]] std::vector<EngineTask> TakeTasks(AdapterKey adapter)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void StoreReply(AdapterRecord& record, AdapterKey adapter, uint64_t step,
                  StepResultPtr result) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void ForgetReplies(const AdapterRecord& record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void SetFacts(AdapterRecord& record, const AdapterFacts& facts)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  void ShowAdapters() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);

  const Options options;
  const Environment env;

  Mutex mu;
  CondVar changed;
  sched::Scheduler scheduler ABSL_GUARDED_BY(mu);
  sched::Residency residency ABSL_GUARDED_BY(mu);
  std::map<std::string, AdapterKey> keys ABSL_GUARDED_BY(mu);
  std::map<AdapterKey, AdapterRecord> adapters ABSL_GUARDED_BY(mu);
  std::unordered_map<uint64_t, std::unique_ptr<StepWork>> steps
      ABSL_GUARDED_BY(mu);
  std::unordered_map<uint64_t, std::unique_ptr<SampleWork>> samples
      ABSL_GUARDED_BY(mu);
  std::vector<uint64_t> cancelled_samples ABSL_GUARDED_BY(mu);
  StoredReplies replies ABSL_GUARDED_BY(mu);
  std::map<uint64_t, EngineTask> slot_tasks ABSL_GUARDED_BY(mu);  // By ticket.
  std::deque<EngineTask> tasks ABSL_GUARDED_BY(mu);
  std::vector<Callback<bool>> drain_waiters ABSL_GUARDED_BY(mu);
  uint64_t next_id ABSL_GUARDED_BY(mu) = 1;
  uint64_t next_key ABSL_GUARDED_BY(mu) = 1;
  uint64_t last_epoch ABSL_GUARDED_BY(mu) = 0;
  int64_t holds ABSL_GUARDED_BY(mu) = 0;
  bool draining ABSL_GUARDED_BY(mu) = false;
  bool stopping ABSL_GUARDED_BY(mu) = false;
  // Once Next will not be called again: why.
  absl::Status closed ABSL_GUARDED_BY(mu);

 private:
  void DropStep(std::unique_ptr<StepWork> work, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
};

// "adapter_id: 'x' does not exist".
[[nodiscard]] absl::Status NoSuchAdapter(const std::string& adapter_id);

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_STATE_H_
