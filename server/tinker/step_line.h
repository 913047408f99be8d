// The steps of one model, from their arrival to their end.
//
// The front gives steps to the engine in the order of their sequence numbers,
// whatever order they arrive in, because a load changes the mapping of all
// later numbers to the adapter's steps. A load starts when all steps before it
// have ended, and all steps behind it wait for its end.
#ifndef WEFT_SERVER_TINKER_STEP_LINE_H_
#define WEFT_SERVER_TINKER_STEP_LINE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "server/call.h"
#include "server/tinker/futures.h"
#include "src/request/reply.h"

namespace weft::tinker {

// The arguments of a step's work: the adapter's step, the callback for the
// result, and where to put the engine's handle (null: nowhere).
struct StepRun {
  uint64_t number = 0;
  Callback<FutureResult> done;
  CancelHandle* cancel = nullptr;
};

// Begins the work of a step. If it returns an error, nothing has begun and
// `done` does not run.
using StepTask = std::function<absl::Status(const StepRun&)>;

// A step whose request has arrived.
struct ArrivedStep {
  std::string future;
  CallOrigin origin;
  StepTask task;
  bool is_load = false;
  // The step's bytes in Front::waiting.
  std::shared_ptr<void> reserved;
};

// A step that the front has given to the engine.
struct RunningStep {
  ArrivedStep step;
  std::shared_ptr<CancelHandle> cancel = std::make_shared<CancelHandle>();
  // True if it was cancelled to make room; it goes back into the line.
  bool again = false;
};

// The line of one model.
struct StepLine {
  // The lowest sequence number that the engine does not have.
  int64_t next = 1;
  // The sequence number of the load that runs, or 0 while the model's first
  // request makes it. While it is set, no other step may begin.
  std::optional<int64_t> loading;
  // Steps that wait for their turn, by sequence number.
  std::map<int64_t, ArrivedStep> arrived;
  // Steps in the engine. A step that has failed stays here until another step
  // has taken its number.
  std::map<int64_t, RunningStep> running;
  bool advances = false;  // Advance is running.
  bool retries = false;   // A timer will run Advance.
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_LINE_H_
