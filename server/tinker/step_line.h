// Holds the steps of one model, from their arrival to their end.
#ifndef WEFT_SERVER_TINKER_STEP_LINE_H_
#define WEFT_SERVER_TINKER_STEP_LINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/call.h"
#include "server/tinker/futures.h"
#include "src/request/reply.h"

namespace weft::tinker {

// The arguments of a StepTask: the number of the step, the callback for the
// result, and a place for the handle that cancels the step (may be null).
struct StepRun {
  uint64_t number = 0;
  Callback<FutureResult> done;
  CancelHandle* cancel = nullptr;
};

// Begins the work of a step. If a StepTask returns an error, `done` does not
// run, and the engine does no more work for the step.
using StepTask = std::function<absl::Status(const StepRun&)>;

// A step whose request has arrived.
struct ArrivedStep {
  std::string future;
  CallOrigin origin;
  StepTask task;
  // The charge for the step's bytes, in Front::waiting or ServiceCore::memory.
  std::shared_ptr<void> reserved;
};

// A step that the front has given to the engine.
struct RunningStep {
  ArrivedStep step;
  std::shared_ptr<CancelHandle> cancel = std::make_shared<CancelHandle>();
};

// The steps of one model that wait or run.
struct StepLine {
  // The sequence number of the step that the front next gives to the engine.
  int64_t next = 1;
  bool held = false;  // The model is being made, so no step may begin.
  // Steps that wait for their turn, by sequence number.
  std::map<int64_t, ArrivedStep> arrived;
  // Steps that the engine has, by sequence number.
  std::map<int64_t, RunningStep> running;
  bool advances = false;  // Advance is running.
  bool retries = false;   // A timer will run Advance.
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_LINE_H_
