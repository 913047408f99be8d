// The work that the dispatcher gives to the engine thread. Work holds pointers
// to requests. A pointer is valid until the engine thread ends the work. If the
// adapter is removed between two slices of a step, the pointer becomes invalid
// then.
#ifndef WEFT_SRC_DISPATCH_WORK_H_
#define WEFT_SRC_DISPATCH_WORK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "src/dispatch/residency.h"
#include "src/dispatch/scheduled_work.h"
#include "src/request/adapter_key.h"
#include "src/request/sample.h"
#include "src/request/step_task.h"

namespace weft::dispatch {

// A sample that has left the queue.
struct SampleTask {
  uint64_t id = 0;  // The sample's id in SampleDesk.
  AdapterKey adapter = AdapterKey::kBaseModel;
  // The scheduler's key of the adapter: tenants that sample the base model have
  // different ones (AdapterKey).
  AdapterKey flow = AdapterKey::kBaseModel;
  std::string tenant;
  const SampleRequest* request = nullptr;
  absl::Time accepted_at;
  bool streams = false;  // The caller wants deltas.
};

// A task for the engine thread, which calls it with OK. If the task can no
// longer do its work, some thread calls it with an error instead.
using EngineTask = std::function<void(const absl::Status&)>;

// Tasks to run between two plans, in this order.
struct RunTasks {
  std::deque<EngineTask> tasks;
};
// A move of an adapter's tensors. The move ends with AdapterDesk::FinishMove.
struct RunMove {
  Move move;
};
// One micro-batch. A slice ends with StepDesk::FinishSlice. If the slice is the
// request's last or fails, it ends with StepDesk::Complete instead.
struct RunTrain {
  bool backward = false;
  std::vector<StepSlice> slices;
};
// A step that runs alone on the device. The step ends with StepDesk::Complete.
struct RunStep {
  StepTask step;
};
// The engine thread admits the samples for which there is room. Then it runs
// one decode iteration.
struct RunDecode {};
// Samples in prefill or decode that the client has cancelled. Each of them ends
// with SampleDesk::Finish.
struct CancelSamples {
  std::vector<uint64_t> ids;
};
// There was no work for a while. The engine thread may check the device.
struct Idle {};

using Work = std::variant<RunTasks, RunMove, RunTrain, RunStep, RunDecode,
                          CancelSamples, Idle>;

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_WORK_H_
