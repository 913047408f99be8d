// The dispatcher's entries for a step, a sample and an adapter.
#ifndef WEFT_SRC_DISPATCH_ENTRIES_H_
#define WEFT_SRC_DISPATCH_ENTRIES_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/dispatch/replay_table.h"
#include "src/dispatch/work.h"
#include "src/request/reply.h"

namespace weft::dispatch {

using StepCallback =
    std::function<void(absl::StatusOr<StepResultPtr>, bool replayed)>;

struct StepWork {
  // A caller of this step: the first caller or one that repeated the call.
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
  bool again = false;      // Replayed from the log, not scheduled.
  bool cancelled = false;  // No caller waits: ends at its next slice.
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

// The facts that the owner of an adapter's tensors gives.
struct AdapterFacts {
  // Without adapter_id, tenant, last_step, durable_step and last_used_at, which
  // the dispatcher sets. The epoch is 0 unless a new one begins.
  AdapterInfo info;
  uint64_t image_bytes = 0;  // Bytes of the tensors off the device.
};

// The load that began an adapter's present epoch. Its number belongs to the
// epoch before, so a repeated call of the load is found here.
struct LoadOrigin {
  uint64_t step = 0;
  std::string digest;
  StepResultPtr result;
};

// The dispatcher's record of an adapter. The scheduler and the residency policy
// have their own entries under the same key.
struct AdapterRecord {
  AdapterInfo info;  // Without last_step, which the scheduler knows.
  uint64_t image_bytes = 0;
  ReplayTable replays;
  std::optional<LoadOrigin> origin;
  std::optional<absl::Time> wanted_at;  // When work began to wait for it.
  std::vector<EngineTask> tasks;        // To run when it is on the device.
  bool pinned = false;                  // Stays on the device.
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_ENTRIES_H_
