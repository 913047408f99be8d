// What the dispatcher holds of a step, of a sample and of an adapter.
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

// The load that an adapter's present epoch began with. Its number belongs to
// the epoch before, and so a repeated call of it is found here.
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

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_ENTRIES_H_
