// What the engine thread is given to do. A pointer to a request stays valid
// until the engine thread ends the work, or removes the adapter of a step that
// is between two slices.
#ifndef WEFT_SRC_DISPATCH_WORK_H_
#define WEFT_SRC_DISPATCH_WORK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "src/request/adapter_key.h"
#include "src/request/sample.h"
#include "src/request/step.h"
#include "src/sched/residency.h"
#include "src/sched/work.h"

namespace weft::dispatch {

// A step that has been started.
struct StepTask {
  uint64_t id = 0;  // Names it in StepDesk.
  AdapterKey adapter = AdapterKey::kBaseModel;
  uint64_t step = 0;       // Its number; 0: it has none.
  uint64_t last_step = 0;  // The adapter's, before it.
  const StepRequest* request = nullptr;
  const std::string* digest = nullptr;  // PayloadDigest of the request.
};

// A sample that has been taken from the queue.
struct SampleTask {
  uint64_t id = 0;  // Names it in SampleDesk.
  AdapterKey adapter = AdapterKey::kBaseModel;
  const SampleRequest* request = nullptr;
  absl::Time accepted_at;
  bool streams = false;  // Its caller wants deltas.
};

// Runs on the engine thread with OK, or, with the error that says why it never
// will, wherever that was found.
using EngineTask = std::function<void(const absl::Status&)>;

// Between two plans, in this order.
struct RunTasks {
  std::deque<EngineTask> tasks;
};
// Move an adapter's tensors; ends with AdapterDesk::FinishMove.
struct RunMove {
  sched::Move move;
};
// One micro-batch. steps[i] is the request of slices[i]. Each slice ends with
// StepDesk::FinishSlice or, if it is the last or fails, with Complete.
struct RunTrain {
  bool backward = false;
  std::vector<sched::TrainSlice> slices;
  std::vector<StepTask> steps;
};
// A step that shares the device with nothing; ends with StepDesk::Complete.
struct RunStep {
  StepTask step;
};
// Take samples in as far as there is room, then one decode iteration.
struct RunDecode {};
// Samples whose callers no longer want them; each ends with SampleDesk::Finish.
struct CancelSamples {
  std::vector<uint64_t> ids;
};
// Nothing to do for a while: a chance to look after the device.
struct Idle {};

using Work = std::variant<RunTasks, RunMove, RunTrain, RunStep, RunDecode,
                          CancelSamples, Idle>;

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_WORK_H_
