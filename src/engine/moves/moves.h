// Moves units between the logs of a store (move_parts.h).
#ifndef WEFT_SRC_ENGINE_MOVES_MOVES_H_
#define WEFT_SRC_ENGINE_MOVES_MOVES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/engine/moves/arrival.h"
#include "src/engine/moves/departure.h"
#include "src/engine/moves/log_drain.h"
#include "src/engine/moves/move_parts.h"
#include "src/engine/recovery/log_replay.h"
#include "src/request/adapter.h"
#include "src/request/move_unit.h"
#include "src/request/reply.h"

namespace weft::engine {

// Threads: engine thread.
class Moves {
 public:
  // The pointers outlive the object.
  Moves(const EngineContext* context, AdapterManager* manager,
        Snapshotter* snapshots, SampleRunner* samples,
        prometheus::Registry* registry)
      : context_(*context),
        parts_(context, manager, snapshots, samples, registry) {}

  // Does what Departure::Start does. Errors, besides: FAILED_PRECONDITION
  // without other logs; UNAVAILABLE if the log is not replayed yet.
  void Start(const MoveAdapterRequest& request, bool is_replayed,
             const Callback<bool>& done);
  // Does what Departure::Join does.
  bool Join(const MoveAdapterRequest& request, const Callback<bool>& done) {
    return departure_.Join(UnitOf(request.adapter_id), request.log, done);
  }
  // Does what LogDrain::Start does. Errors, besides: those of Start.
  void DrainLog(bool is_replayed, const Callback<bool>& done);
  // Returns whether the log is to stay without adapters.
  bool drained() const { return drain_.succeeded(); }
  // Returns whether DrainLog has begun and did not fail, so that nothing new
  // is to begin here. Any thread may call it.
  bool empties() const { return drain_.empties(); }
  // Ends the moves of an earlier process. Without other logs there are none
  // (copy_state.h). Call it before GoOn.
  void Resume(OpenMoves moves);
  // Call it between two pieces of work, when the log is replayed.
  void GoOn(absl::Time now);
  // Returns when GoOn has something to do at the latest.
  absl::Time next_due() const { return parts_.next_due(); }
  // Gives all callers the error. Call it after the last GoOn.
  void Close(const absl::Status& status) {
    departure_.Close(status);
    drain_.Close(status);
  }

 private:
  bool has_others() const {
    return context_.directory != nullptr && context_.directory->has_others();
  }
  // Returns why no move can begin.
  absl::Status Check(bool is_replayed) const;

  const EngineContext& context_;
  MoveParts parts_;
  Departure departure_{&parts_};
  Arrival arrival_{&parts_};
  LogDrain drain_{&parts_, &departure_};
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_MOVES_MOVES_H_
