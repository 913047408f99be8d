// The dispatcher's entries for a step, a sample and an adapter.
#ifndef WEFT_SRC_DISPATCH_ENTRIES_H_
#define WEFT_SRC_DISPATCH_ENTRIES_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "src/dispatch/replay_table.h"
#include "src/dispatch/train_history.h"
#include "src/dispatch/work.h"
#include "src/request/reply.h"

namespace weft::dispatch {

struct StepWork {
  // A caller that waits for this step: the first caller, or one that repeated
  // the call.
  struct Waiter {
    uint64_t id = 0;
    StepCallback done;
    bool repeated = false;  // True if this caller repeated the call.
  };
  // Never changes after the step has started. A step that is withdrawn before
  // has a RefusedStep.
  StepRequest request;
  AdapterKey adapter = AdapterKey::kBaseModel;
  std::string digest;
  uint64_t step = 0;
  WorkKind kind = WorkKind::kTrain;
  absl::Time accepted_at;
  TraceId trace = CurrentTrace();  // The first caller's trace id.
  bool started = false;
  bool again = false;  // A replay from the log; unknown to the scheduler.
  bool late = false;   // A save that came in a drain.
  // KeepStep::note of a kept step, which is never dropped because its number is
  // behind a gap. If the adapter is in the log, so is the step.
  std::optional<std::string> note;
  std::vector<Waiter> waiters;
};

struct SampleWork {
  SampleRequest request;  // Never changes.
  AdapterKey adapter = AdapterKey::kBaseModel;
  AdapterKey flow = AdapterKey::kBaseModel;  // As in SampleTask.
  std::string tenant;
  absl::Time accepted_at;
  std::function<void(SampleDelta)> on_delta;  // Empty if no caller streams.
  Callback<SampleResult> done;
};

// Facts about an adapter, from the engine thread.
struct AdapterFacts {
  // The dispatcher ignores adapter_id, tenant, last_step, next_step,
  // durable_step and last_used_at, because it has its own values. It takes the
  // durability and the epoch only when it adds the adapter. If the given epoch
  // is 0, the dispatcher chooses one.
  AdapterInfo info;
  uint64_t image_bytes = 0;  // Bytes of the tensors when off the device.
};

// The dispatcher's record of an adapter. The scheduler and the residency policy
// have their own entries under the same key.
struct AdapterRecord {
  AdapterInfo info;  // Its next_step is not used: the scheduler has it.
  uint64_t image_bytes = 0;
  ReplayTable replays;
  TrainHistory history;
  std::optional<absl::Time> wanted_at;  // When the wait for the device began.
  std::vector<EngineTask> tasks;        // Tasks of AdapterDesk::WhenOnDevice.
  absl::Status stopped;  // Not OK: no step runs any more (StepDesk::StopLine).
  bool pinned = false;   // A pinned adapter stays on the device.
  // A checkpoint's weights (AdapterDesk::AddSampler): no client sees it, and it
  // is none of its tenant's adapters.
  bool hidden = false;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_ENTRIES_H_
