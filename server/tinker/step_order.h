// Gives a model's steps to the engine in their order (step_line.h).
//
// If a step is refused, or fails without having happened, it leaves no gap: a
// step that does nothing takes its number, and no limit of the tenant applies
// to it.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEP_ORDER_H_
#define WEFT_SERVER_TINKER_STEP_ORDER_H_

#include <optional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// The pause before the next try after the engine had no room.
inline constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// How far a step's sequence number may be ahead of the lowest one that the
// engine does not have.
inline constexpr int64_t kMaxAhead = 4096;

// Runs the step in its turn. If the engine has had its number, the step goes to
// the engine at once and gets the stored reply.
void EnterStep(Front& front, const std::string& model, int64_t seq,
               ArrivedStep step);

// Lets the model's steps begin. Call it when the request that makes the model,
// or a load, has ended.
void OpenLine(Front& front, const std::string& model);

// Records that the load with number `seq` has set the adapter to `last_step`.
// Calls `done` when the record is on disk, or with the error.
void NoteLoad(Front& front, Model& model, int64_t seq, uint64_t last_step,
              const std::function<void(absl::Status)>& done);
// Returns true if NoteLoad has recorded the load with this number.
[[nodiscard]] bool HasLoaded(const Model& model, int64_t seq);
// Returns the sequence number of the latest load; 0 if there is none. No step
// below it may run. A load that has begun counts, because it may have ended
// without a record.
[[nodiscard]] int64_t LatestLoad(const Model& model);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_ORDER_H_
