// The paths of checkpoints, "tinker://RUN/KIND/NAME".
// Threads: any.
#ifndef WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_
#define WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::server::tinker {

inline constexpr absl::string_view kPathScheme = "tinker://";

enum class CheckpointKind : uint8_t { kTraining, kSampler, kExternal };

struct CheckpointPath {
  std::string run;  // The model's id (ModelOfAdapter).
  CheckpointKind kind = CheckpointKind::kTraining;
  std::string name;

  // Returns "weights/NAME", "sampler_weights/NAME" or "external_weights/NAME".
  std::string Id() const;
  // Returns the whole path, "tinker://RUN/KIND/NAME".
  std::string ToString() const;
  // Returns the name that Weft gives the checkpoint: NAME for a training
  // checkpoint, "KIND.NAME" for others.
  std::string WeftName() const;
  // Returns "training", "sampler" or "external".
  const char* KindName() const;
  // Returns "save_weights", "save_weights_for_sampler" or
  // "save_weights_external".
  const char* SavedBy() const;
};

// Parses "tinker://RUN/KIND/NAME". Errors: INVALID_ARGUMENT, whose message
// calls the path `field`; that of `path`.
absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    const absl::StatusOr<std::string>& path, absl::string_view field = "path");
// Makes the path of the checkpoint `name`. Errors: INVALID_ARGUMENT, whose
// message calls the name `field`. The name of a training checkpoint must not
// begin with "sampler_weights." or "external_weights.", because PathOfWeft
// takes such names for other kinds.
absl::StatusOr<CheckpointPath> NameCheckpoint(absl::string_view field,
                                              absl::string_view run,
                                              CheckpointKind kind,
                                              absl::string_view name);
// Returns the path of a checkpoint from its run and its name in Weft.
CheckpointPath PathOfWeft(absl::string_view run, absl::string_view weft_name);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_CHECKPOINT_PATH_H_
