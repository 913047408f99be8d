// The path of a checkpoint, "tinker://RUN/KIND/NAME", and its name in Weft.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_
#define WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::tinker {

enum class CheckpointKind : uint8_t { kTraining, kSampler, kExternal };

struct CheckpointPath {
  std::string run;  // The model's id (ModelOfAdapter).
  CheckpointKind kind = CheckpointKind::kTraining;
  std::string name;

  // Returns "weights/NAME", "sampler_weights/NAME" or "external_weights/NAME".
  [[nodiscard]] std::string Id() const;
  // Returns the whole path, "tinker://RUN/KIND/NAME".
  [[nodiscard]] std::string ToString() const;
  // Returns the name that Weft gives the checkpoint: NAME for a training
  // checkpoint, "KIND.NAME" for others.
  [[nodiscard]] std::string WeftName() const;
  // Returns "training", "sampler" or "external".
  [[nodiscard]] const char* KindName() const;
};

// Parses "tinker://RUN/KIND/NAME". Errors: INVALID_ARGUMENT.
[[nodiscard]] absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    absl::string_view path);
// Makes the path of the checkpoint `name`. Errors: INVALID_ARGUMENT, whose
// message calls the name `field`. The name of a training checkpoint must not
// begin with "sampler_weights." or "external_weights.", because PathOfWeft
// takes such names for other kinds.
[[nodiscard]] absl::StatusOr<CheckpointPath> NameCheckpoint(
    absl::string_view field, absl::string_view run, CheckpointKind kind,
    absl::string_view name);
// Makes the path from a run and "KIND/NAME". Errors: INVALID_ARGUMENT.
[[nodiscard]] absl::StatusOr<CheckpointPath> ParseCheckpointId(
    absl::string_view run, absl::string_view id);
// Returns the path of a checkpoint from its run and its name in Weft.
[[nodiscard]] CheckpointPath PathOfWeft(absl::string_view run,
                                        absl::string_view weft_name);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_
