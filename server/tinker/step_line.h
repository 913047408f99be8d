// The steps of one model on their way to the engine.
//
// The front gives them to the engine in the order of their numbers, whatever
// order they arrive in, because a load decides which steps the numbers behind
// it are: it starts when all before it have ended, and those behind it wait for
// its end.
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

// What a step's work gets: its number at the engine, where its result goes, and
// where the engine's handle goes.
struct StepRun {
  uint64_t number = 0;
  Callback<FutureResult> done;
  CancelHandle* cancel = nullptr;
};

// Begins the work; an error it returns means that nothing has begun.
using StepTask = std::function<absl::Status(const StepRun&)>;

// A step that has arrived.
struct ArrivedStep {
  std::string future;
  CallOrigin origin;
  StepTask task;
  bool is_load = false;
  // Its part of what may wait in the front.
  std::shared_ptr<void> reserved;
};

// A step that the engine has.
struct RunningStep {
  ArrivedStep step;
  std::shared_ptr<CancelHandle> cancel = std::make_shared<CancelHandle>();
  // It was cancelled to make room, and goes back into the line.
  bool again = false;
};

struct StepLine {
  // The lowest number that the engine does not have.
  int64_t next = 1;
  // The model is made or loaded: no step of it may begin. 0: by the request
  // that makes it.
  std::optional<int64_t> loading;
  std::map<int64_t, ArrivedStep> arrived;
  // A step that has failed stays until its number is filled.
  std::map<int64_t, RunningStep> running;
  bool advances = false;  // Advance is on the stack.
  bool retries = false;   // Advance comes again by itself.
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_LINE_H_
