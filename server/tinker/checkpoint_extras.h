// Keeps the extras of checkpoints: the metadata, the time of expiry and the
// base model's name that clients of the Tinker API give. The engine does not
// know the extras.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_CHECKPOINT_EXTRAS_H_
#define WEFT_SERVER_TINKER_CHECKPOINT_EXTRAS_H_

#include <optional>
#include <string>

#include "absl/time/time.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr int64_t kMinTtlSeconds = 3600;
inline constexpr int64_t kMaxTtlSeconds = 10LL * 365 * 86400;

struct CheckpointExtras {
  std::string user_metadata;             // ShownField.
  std::optional<absl::Time> expires_at;  // In whole seconds.
  std::string base_model;                // Model::base_model.
  std::string copied_from;       // The path of the checkpoint copied; or empty.
  std::shared_ptr<void> charge;  // Front::ChargeEntry.
};

// Reads `user_metadata` and `ttl_seconds`, the seconds from now until the
// checkpoint expires. Errors: INVALID_ARGUMENT if `ttl_seconds` is not a whole
// number in [kMinTtlSeconds, kMaxTtlSeconds]; those of ShownField.
[[nodiscard]] absl::StatusOr<CheckpointExtras> ReadExtras(const Json& body);

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

#endif  // WEFT_SERVER_TINKER_CHECKPOINT_EXTRAS_H_
