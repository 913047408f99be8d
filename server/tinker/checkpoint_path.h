// "tinker://RUN/KIND/NAME", and what Weft calls that checkpoint.
#ifndef WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_
#define WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::tinker {

enum class CheckpointKind : uint8_t { kTraining, kSampler, kExternal };

struct CheckpointPath {
  std::string run;  // A model's id.
  CheckpointKind kind = CheckpointKind::kTraining;
  std::string name;

  // "weights/NAME", "sampler_weights/NAME" or "external_weights/NAME".
  [[nodiscard]] std::string Id() const;
  [[nodiscard]] std::string ToString() const;
  // The checkpoint's name among those of the run's adapter: NAME for weights,
  // "KIND.NAME" for others.
  [[nodiscard]] std::string WeftName() const;
  // "training", "sampler" or "external".
  [[nodiscard]] const char* KindName() const;
};

// Errors: INVALID_ARGUMENT.
[[nodiscard]] absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    absl::string_view path);
// From a run and "KIND/NAME". A name that would be another kind's in Weft is
// refused.
[[nodiscard]] absl::StatusOr<CheckpointPath> ParseCheckpointId(
    absl::string_view run, absl::string_view id);
// The path of a checkpoint of Weft's.
[[nodiscard]] CheckpointPath PathOfWeft(absl::string_view run,
                                        absl::string_view weft_name);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_
