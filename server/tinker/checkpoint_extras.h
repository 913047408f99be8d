// What Tinker knows of a checkpoint and Weft does not: the user's metadata, and
// when it expires.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_CHECKPOINT_EXTRAS_H_
#define WEFT_SERVER_TINKER_CHECKPOINT_EXTRAS_H_

#include <optional>

#include "absl/time/time.h"
#include "server/tinker/checkpoint_path.h"
#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr int64_t kMinTtlSeconds = 3600;
inline constexpr int64_t kMaxTtlSeconds = 10LL * 365 * 86400;

struct CheckpointExtras {
  Json user_metadata;                    // Null: none.
  std::optional<absl::Time> expires_at;  // Whole seconds.
};

// From `user_metadata` and `ttl_seconds`, which counts from now.
// INVALID_ARGUMENT when that is not in [kMinTtlSeconds, kMaxTtlSeconds].
[[nodiscard]] absl::StatusOr<CheckpointExtras> ReadExtras(const Json& body);

// Stores the extras, or removes the entry if there are none. A failure is only
// logged, because the checkpoint exists.
void KeepExtras(Front& front, const Caller& caller, const CheckpointPath& path,
                const CheckpointExtras& extras);
[[nodiscard]] CheckpointExtras FindExtras(const Front& front,
                                          const Caller& caller,
                                          const CheckpointPath& path);

// Deletes checkpoints whose time is over.
void SweepCheckpoints(Front& front, absl::Time now);

void RestoreExtras(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_CHECKPOINT_EXTRAS_H_
