// Converts the results of a model's steps to the results of their futures.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_STEP_OUTPUT_H_
#define WEFT_SERVER_TINKER_STEP_OUTPUT_H_

#include <string>

#include "absl/strings/string_view.h"
#include "server/caller.h"
#include "server/tinker/futures.h"
#include "src/request/step.h"

namespace weft::tinker {

// Return the id of a session's sampling session with this number, and the name
// of the snapshot that it samples from.
[[nodiscard]] std::string SamplerId(absl::string_view session, int64_t number);
[[nodiscard]] std::string SnapshotName(int64_t number);

// Return the result of a future: AdapterInfo is the result of a load, and
// PublishedSnapshot that of a save for a sampling session.
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const TrainResult& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const OptimStepResult& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const CheckpointInfo& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const AdapterInfo& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const PublishedSnapshot& result);
// `caller` made the model. An error names the caller's adapters.
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const Caller& caller,
                                    const StepResult& result);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEP_OUTPUT_H_
