// Gives a model's steps to the engine; see step_line.h.
//
// A step that is refused, or fails so that it has not happened, leaves no gap:
// one that does nothing takes its number, before any limit of the tenant.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEP_ORDER_H_
#define WEFT_SERVER_TINKER_STEP_ORDER_H_

#include <optional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// When to try again what the engine had no room for.
inline constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// How many numbers a step may be ahead of the lowest that has not come.
inline constexpr int64_t kMaxAhead = 4096;

// Runs the step in its turn. One whose number the engine has had goes to it at
// once, for its stored reply.
void EnterStep(Front& front, const std::string& model, int64_t seq,
               ArrivedStep step);

// The model's own request has ended: its steps may begin.
void OpenLine(Front& front, const std::string& model);

// Notes that the load of number `seq` has led to `last_step`, and calls `done`
// when that is on disk.
void NoteLoad(Front& front, Model& model, int64_t seq, uint64_t last_step,
              const std::function<void(absl::Status)>& done);
// Returns true if NoteLoad has noted this load.
[[nodiscard]] bool HasLoaded(const Model& model, int64_t seq);
// Returns the number of the latest load, which no step may be below: 0 for
// none. A load that has begun counts after a restart.
[[nodiscard]] int64_t LatestLoad(const Model& model);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_ORDER_H_
