// Holds the steps of one model, from their arrival to their end.
//
// Steps may arrive in any order. The front gives them to the engine in the
// order of their sequence numbers, because a load changes the mapping from
// later sequence numbers to the adapter's steps (Model::offsets). A load starts
// when all steps before it have ended, and all steps after it wait for its end.
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

// The arguments of a StepTask: the number of the adapter's step, the callback
// for the result, and a place for the handle that cancels the step (may be
// null).
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
  bool is_load = false;
  // The reservation of the step's bytes in Front::waiting; null if they did not
  // fit.
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
  // The sequence number of the load that runs, or 0 while the model is being
  // made. While `loading` has a value, no other step may begin.
  std::optional<int64_t> loading;
  // Steps that wait for their turn, by sequence number.
  std::map<int64_t, ArrivedStep> arrived;
  // Steps that the engine has, by sequence number. A failed step stays here
  // while FillStep gives its number to a step that does nothing.
  std::map<int64_t, RunningStep> running;
  bool advances = false;  // Advance is running.
  bool retries = false;   // A timer will run Advance.
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_LINE_H_
