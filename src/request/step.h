// A step: one numbered call on an adapter. Its requests and results as
// variants, alternative by alternative.
#ifndef WEFT_SRC_REQUEST_STEP_H_
#define WEFT_SRC_REQUEST_STEP_H_

#include <cstdint>
#include <string>
#include <variant>

#include "absl/time/time.h"
#include "src/request/adapter.h"
#include "src/request/train.h"

namespace weft {

// Result of PublishSnapshotRequest.
struct PublishedSnapshot {
  uint64_t version = 0;
};

using StepRequest =
    std::variant<TrainRequest, OptimStepRequest, SaveCheckpointRequest,
                 LoadCheckpointRequest, PublishSnapshotRequest>;
using StepResult = std::variant<TrainResult, OptimStepResult, CheckpointInfo,
                                AdapterInfo, PublishedSnapshot>;

[[nodiscard]] const std::string& AdapterIdOf(const StepRequest& request);
// The number that the caller chose; 0: none. A load never has one.
[[nodiscard]] uint64_t StepOf(const StepRequest& request);
[[nodiscard]] absl::Time DeadlineOf(const StepRequest& request);
// As PayloadDigest of the alternative (digest.h).
[[nodiscard]] std::string PayloadDigest(const StepRequest& request);

// Memory that the result's numbers take, in bytes: nearly all that it holds.
[[nodiscard]] int64_t NumBytes(const StepResult& result);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_STEP_H_
