// The path of a checkpoint, "tinker://RUN/KIND/NAME", and its name in Weft.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_CHECKPOINTS_H_
#define WEFT_SERVER_TINKER_CHECKPOINTS_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/tinker/front.h"

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
  // Returns "save_weights", "save_weights_for_sampler" or
  // "save_weights_external".
  [[nodiscard]] const char* SavedBy() const;
};

// Parses "tinker://RUN/KIND/NAME". Errors: INVALID_ARGUMENT; that of `path`.
[[nodiscard]] absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    const absl::StatusOr<std::string>& path);
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

// Keeps the extras of checkpoints: the metadata, the time of expiry and the
// base model's name that clients of the Tinker API give. The engine does not
// know the extras.
// Threads: the front's.

inline constexpr int64_t kMinTtlSeconds = 3600;
inline constexpr int64_t kMaxTtlSeconds = 10LL * 365 * 86400;

// Reads `user_metadata` and `ttl_seconds`, the seconds from now until the
// checkpoint expires. Errors: INVALID_ARGUMENT if `ttl_seconds` is not a whole
// number in [kMinTtlSeconds, kMaxTtlSeconds]; those of ShownField.
[[nodiscard]] absl::StatusOr<CheckpointExtras> ReadExtras(const Json& body);

// Sets `extras->charge` to a charge of the caller for the text. Errors: those
// of Front::ChargeEntry.
[[nodiscard]] absl::Status ChargeExtras(const Front& front,
                                        const Caller& caller,
                                        CheckpointExtras* extras);

// Stores a checkpoint's extras in Front::extras and in the ledger. If all
// fields of `extras` are empty, removes the entry. A failed write is only
// logged, because the checkpoint itself exists.
void KeepExtras(Front& front, const Caller& caller, const CheckpointPath& path,
                const CheckpointExtras& extras);
// Returns the extras; all fields are empty if the checkpoint has none.
[[nodiscard]] CheckpointExtras FindExtras(const Front& front,
                                          const Caller& caller,
                                          const CheckpointPath& path);

// Returns the base model's name: the one in the extras, otherwise the served
// model's.
[[nodiscard]] std::string BaseModelOf(const Front& front, const Caller& caller,
                                      const CheckpointPath& path);

// Has the engine delete the checkpoints that have expired by `now`, and then
// removes their extras.
void SweepCheckpoints(Front& front, absl::Time now);

// Reads all extras from the ledger.
void RestoreExtras(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_CHECKPOINTS_H_
