// A step: a call that trains or scores data, or that saves, loads or publishes
// an adapter. The alternatives of StepRequest and of StepResult are in the same
// order. A result may also be a StepFailure.
#ifndef WEFT_SRC_REQUEST_STEP_H_
#define WEFT_SRC_REQUEST_STEP_H_

#include <cstdint>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "src/request/train.h"

namespace weft {

// The result of a PublishSnapshotRequest.
struct PublishedSnapshot {
  uint64_t version = 0;
};

// The result of a step that ran but failed because of its request, the
// adapter's state or the checkpoints on disk. The step counts as completed: it
// keeps its number, and `status` is its stored reply.
struct StepFailure {
  absl::Status status;
};

using StepRequest =
    std::variant<TrainRequest, OptimStepRequest, SaveCheckpointRequest,
                 LoadCheckpointRequest, PublishSnapshotRequest>;
using StepResult = std::variant<TrainResult, OptimStepResult, CheckpointInfo,
                                AdapterInfo, PublishedSnapshot, StepFailure>;

[[nodiscard]] const std::string& AdapterIdOf(const StepRequest& request);
// Returns the step number that the caller chose, or 0 if it chose none.
[[nodiscard]] uint64_t StepOf(const StepRequest& request);
// Returns the adapter epoch that the caller named. 0 means the present epoch.
[[nodiscard]] uint64_t EpochOf(const StepRequest& request);
[[nodiscard]] absl::Time DeadlineOf(const StepRequest& request);
// Returns whether a step that ran and ended with this error is a StepFailure.
// These errors are StepFailures:
//
//   OptimStep         FAILED_PRECONDITION (the gradient is not finite)
//   PublishSnapshot   ALREADY_EXISTS
//   SaveCheckpoint    ALREADY_EXISTS
//   LoadCheckpoint    NOT_FOUND, DATA_LOSS, FAILED_PRECONDITION
// After any other error the step has not happened.
[[nodiscard]] bool IsStepFailure(const StepRequest& request,
                                 const absl::Status& status);
// Returns the PayloadDigest of the request that the variant holds (digest.h).
[[nodiscard]] std::string PayloadDigest(const StepRequest& request);

// Returns roughly how many bytes of memory the result takes.
[[nodiscard]] int64_t NumBytes(const StepResult& result);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_STEP_H_
