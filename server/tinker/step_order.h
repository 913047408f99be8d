// Gives a model's steps to the engine in their order (step_line.h).
//
// The engine runs an adapter's steps in the order of their numbers, and waits
// for a number that is missing. So if a step is refused, or fails before it has
// changed anything, an empty step takes its number. The tenant's quotas do not
// apply to empty steps.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEP_ORDER_H_
#define WEFT_SERVER_TINKER_STEP_ORDER_H_

#include <optional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// The pause before the front retries a step or a sample that the engine has
// refused for now.
inline constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// A step's sequence number may be above StepLine::next by at most this much.
inline constexpr int64_t kMaxAhead = 4096;

// Runs the step in its turn. If the engine already has the step's number, gives
// the step to the engine at once to get the stored reply. If the model is gone,
// fails the step's future.
void EnterStep(Front& front, const std::string& model, int64_t seq,
               ArrivedStep step);

// Lets the model's steps begin. Call it when a load has ended, or when the
// request that makes the model has ended.
void OpenLine(Front& front, const std::string& model);

// Records that the load with sequence number `seq` has set the adapter's last
// step to `last_step`. `done` gets the outcome when the ledger has written the
// record.
void NoteLoad(Front& front, Model& model, int64_t seq, uint64_t last_step,
              const std::function<void(absl::Status)>& done);
// Returns true if the load with this number is one of the last two that
// NoteLoad has recorded.
[[nodiscard]] bool HasLoaded(const Model& model, int64_t seq);
// Returns the sequence number of the latest load; 0 if there is none. No step
// with a lower number may run. A load that has begun counts, because it may
// have ended in the engine without a record.
[[nodiscard]] int64_t LatestLoad(const Model& model);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_ORDER_H_
