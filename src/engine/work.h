// A request inside the engine: what to run and who waits for it.
#ifndef WEFT_SRC_ENGINE_WORK_H_
#define WEFT_SRC_ENGINE_WORK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/engine/engine.h"
#include "src/sched/work.h"

namespace weft::engine {

// A result of any step, shared by the replay table and the replies to come.
using ErasedResult = std::shared_ptr<const void>;

struct Waiter {
  uint64_t id = 0;
  std::function<void(absl::StatusOr<ErasedResult>, bool replayed)> done;
};

template <typename Result>
Waiter MakeWaiter(uint64_t id, Callback<StepReply<Result>> done) {
  return {.id = id,
          .done = [done = std::move(done)](absl::StatusOr<ErasedResult> result,
                                           bool replayed) {
            if (!result.ok()) {
              done(result.status());
              return;
            }
            done(StepReply<Result>{
                .result = *static_cast<const Result*>(result->get()),
                .replayed = replayed});
          }};
}

using StepRequest =
    std::variant<TrainRequest, OptimStepRequest, SaveCheckpointRequest,
                 LoadCheckpointRequest, PublishSnapshotRequest>;

// Threads: `request` never changes once queued; the rest is guarded by the
// engine's lock.
struct StepWork {
  StepRequest request;
  std::string adapter_id;
  std::string digest;
  uint64_t step = 0;
  sched::WorkKind kind = sched::WorkKind::kTrain;
  absl::Time accepted_at;
  bool started = false;
  bool cancelled = false;  // Nobody waits: it ends at its next slice.
  bool orphaned = false;   // Its adapter was deleted while it ran.
  std::vector<Waiter> waiters;
};

struct SampleWork {
  std::string tenant;
  SampleRequest request;
  absl::Time accepted_at;
  std::function<void(SampleDelta)> on_delta;  // May be empty.
  Callback<SampleResult> done;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_WORK_H_
