// Steps on their way through the engine: what the dispatcher gives to the
// engine thread, and what the log writes of it.
#ifndef WEFT_SRC_REQUEST_STEP_TASK_H_
#define WEFT_SRC_REQUEST_STEP_TASK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "src/base/trace_id.h"
#include "src/request/adapter_key.h"
#include "src/request/step.h"
#include "src/request/train.h"

namespace weft {

// A step that has started.
struct StepTask {
  uint64_t id = 0;  // The step's id in StepDesk.
  AdapterKey adapter = AdapterKey::kBaseModel;
  uint64_t step = 0;       // The step's number; 0 if it has none.
  uint64_t last_step = 0;  // The steps that the adapter's state has.
  const StepRequest* request = nullptr;
  const std::string* digest = nullptr;  // PayloadDigest of the request.
  TraceId trace;                        // The first caller's trace id.
  bool kept = false;                    // The log has an AcceptedStep of it.
};

// Data [first_datum, first_datum + num_data) of one kTrain request.
struct TrainSlice {
  uint64_t work_id = 0;
  int64_t first_datum = 0;
  int64_t num_data = 0;
  bool last = false;  // True for the request's last slice.

  friend bool operator==(const TrainSlice&, const TrainSlice&) = default;
};

// A slice of a training request, with its step.
struct StepSlice {
  TrainSlice slice;
  StepTask step;

  const TrainRequest& request() const {
    return std::get<TrainRequest>(*step.request);
  }
  // Returns the tokens of the slice's data, without those of a teacher.
  int64_t num_tokens() const {
    int64_t tokens = 0;
    for (int64_t d = 0; d < slice.num_data; ++d) {
      tokens += request().data[slice.first_datum + d].num_tokens();
    }
    return tokens;
  }
};

// A completed step and its result, as snapshots of the state have them.
struct StoredReply {
  uint64_t step = 0;
  std::string digest;  // PayloadDigest of the request.
  StepResultPtr result;
};

// A kept step (KeepStep) that has not ended, as the log has it.
struct AcceptedStep {
  uint64_t work = 0;  // The step's id in later records.
  AdapterKey key = AdapterKey::kBaseModel;
  uint64_t step = 0;
  std::string digest;  // PayloadDigest of the request.
  // One of these two: what the step does, or why it fails in its turn.
  std::optional<StepRequest> request;
  std::optional<StepFailure> refused;
  std::string note;  // KeepStep::note.
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_STEP_TASK_H_
