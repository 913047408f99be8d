// Gives a model's steps to the engine. A step's sequence number is its number
// in the engine, which keeps their order. The front gives few steps at a time,
// the lowest first, because they share the queue of their tenant.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEP_ORDER_H_
#define WEFT_SERVER_TINKER_STEP_ORDER_H_

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

// Lets the model's steps begin. Call it when the request that makes the model
// has ended.
void OpenLine(Front& front, const std::string& model);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_ORDER_H_
