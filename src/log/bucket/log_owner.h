// Owns a log in an object store: takes it, lives on in its manifest, and gives
// it back.
//
// No clock and no lock fences an earlier owner, only the objects. A new owner
// swaps the manifest, then lists the log, then writes a seal at the first free
// place, then looks whether the manifest is still its own. An earlier owner
// that wakes finds its next place taken, by a seal that nobody ever deletes. So
// it can neither write nor answer.
#ifndef WEFT_SRC_LOG_BUCKET_LOG_OWNER_H_
#define WEFT_SRC_LOG_BUCKET_LOG_OWNER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"
#include "src/log/bucket/log_keys.h"
#include "src/log/bucket/manifest.h"
#include "src/store/object_store.h"

namespace weft::log {

struct SeenManifest {
  Manifest manifest;
  std::string etag;  // Empty: there is no manifest.
};

// Errors: DATA_LOSS, and those of object_store.h.
absl::StatusOr<SeenManifest> LookAtManifest(store::ObjectStore& store,
                                            const LogKeys& keys);
// Looks at those of logs 0 to `num_logs` - 1, many at once.
std::vector<absl::StatusOr<SeenManifest>> LookAtManifests(
    store::ObjectStore& store, int num_logs);

// Has processes take a drained log again. Blocks on the store.
absl::Status Undrain(store::ObjectStore& store, const LogKeys& keys);

// What a process may do about a log. It tries the last of these first.
enum class LogClaim {
  kNone,         // Another process lives and has the log, or it is drained.
  kOwnerIsDead,  // Another process had it.
  kFree,         // Nobody has had it, or its owner has released it.
  kOwn,          // A process with this one's name had it: this one restarts.
};

// Decides whether a log is free, by what one process sees on its own clock.
// Threads: one at a time.
class LogWatch {
 public:
  // An owner whose manifest does not change for `patience` counts as dead. If
  // two looks are further apart than `most_gap`, the store did not answer, so
  // the owner could not change it either, and the patience begins anew.
  LogWatch(Instance self, absl::Duration patience, absl::Duration most_gap)
      : self_(std::move(self)), patience_(patience), most_gap_(most_gap) {}

  // `now` is SteadyNow().
  LogClaim Look(const SeenManifest& seen, absl::Time now);

  // Notes that the log is damaged, so that the process leaves it alone.
  void Leave() { left_ = true; }
  bool left() const { return left_; }

 private:
  const Instance self_;
  const absl::Duration patience_;
  const absl::Duration most_gap_;
  std::string etag_;
  absl::Time since_ = absl::InfiniteFuture();
  absl::Time looked_ = absl::InfinitePast();
  bool left_ = false;
};

// Errors of all functions: those of object_store.h, and ABORTED if another
// process has the log. Then no call succeeds any more.
// Threads: any. All functions but fenced(), keys(), epoch() and snapshot()
// block on the store.
class LogOwner {
 public:
  // Takes the log, whose manifest the caller has seen. `store` outlives the
  // object.
  static absl::StatusOr<std::unique_ptr<LogOwner>> Take(
      store::ObjectStore* store, const LogKeys& keys, const SeenManifest& seen,
      const Instance& self);

  const LogKeys& keys() const { return keys_; }
  uint64_t epoch() const { return epoch_; }
  // Returns the first place after this owner's seal.
  uint64_t first_place() const { return first_place_; }
  SnapshotPlace snapshot() const ABSL_LOCKS_EXCLUDED(mu_);

  // Changes the manifest, so that others see that this owner lives, and how
  // much it has to sample.
  absl::Status Beat(std::optional<uint64_t> queued_tokens = std::nullopt);
  // Asks the store whether this owner still has the log.
  absl::Status Confirm() const;
  // From now on a start reads the snapshot, and the log from its place on.
  // REQUIRES: all earlier records are durable.
  absl::Status NameSnapshot(const SnapshotPlace& snapshot);
  // Says that this owner writes no more. If `drained`, nobody takes the log
  // until Undrain.
  absl::Status Release(bool drained = false);

  // Returns ABORTED if another process has the log.
  absl::Status fenced() const ABSL_LOCKS_EXCLUDED(mu_);
  // Notes that another process has the log, and returns fenced().
  absl::Status Fence(const Instance& other) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  LogOwner(store::ObjectStore* store, const LogKeys& keys, SeenManifest own,
           uint64_t first_place)
      : store_(*store),
        keys_(keys),
        epoch_(own.manifest.epoch),
        first_place_(first_place),
        own_(std::move(own)) {}

  absl::Status Change(const std::function<void(Manifest&)>& change)
      ABSL_LOCKS_EXCLUDED(mu_, changing_);

  store::ObjectStore& store_;
  const LogKeys keys_;
  const uint64_t epoch_;
  const uint64_t first_place_;
  Mutex changing_;  // One change at a time; held while the store is asked.
  mutable Mutex mu_;
  SeenManifest own_ ABSL_GUARDED_BY(mu_);
  absl::Status fenced_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_LOG_OWNER_H_
