// Owns a log in an object store: takes it, lives on in its manifest, and gives
// it back.
//
//   owners/0                    the manifest (manifest.h)
//   logs/0/records/<place>      the log, object by object (log_object.h)
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
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"
#include "src/log/bucket/manifest.h"
#include "src/store/object_store.h"

namespace weft::log {

inline constexpr char kManifestKey[] = "owners/0";
inline constexpr char kRecordsPrefix[] = "logs/0/records/";
std::string KeyOfPlace(uint64_t place);
// Returns the place of a key that KeyOfPlace has made; 0 for other keys.
uint64_t PlaceOfKey(const std::string& key);

struct SeenManifest {
  Manifest manifest;
  std::string etag;  // Empty: there is no manifest.
};

// Errors: DATA_LOSS, and those of object_store.h.
absl::StatusOr<SeenManifest> LookAtManifest(store::ObjectStore& store);

// Decides whether a log is free, by what one process sees on its own clock.
// Threads: one at a time.
class LogWatch {
 public:
  // An owner whose manifest does not change for `patience` counts as dead. If
  // two looks are further apart than `most_gap`, the store did not answer, so
  // the owner could not change it either, and the patience begins anew.
  LogWatch(Instance self, absl::Duration patience, absl::Duration most_gap)
      : self_(std::move(self)), patience_(patience), most_gap_(most_gap) {}

  // Returns whether the process may try to take the log: nobody has it, its
  // owner has released it, is dead, or has this process's name. `now` is
  // SteadyNow().
  bool IsFree(const SeenManifest& seen, absl::Time now);

 private:
  const Instance self_;
  const absl::Duration patience_;
  const absl::Duration most_gap_;
  std::string etag_;
  absl::Time since_ = absl::InfiniteFuture();
  absl::Time looked_ = absl::InfinitePast();
};

// Errors of all functions: those of object_store.h, and ABORTED if another
// process has the log. Then no call succeeds any more.
// Threads: any. All functions but fenced(), epoch() and snapshot() block on the
// store.
class LogOwner {
 public:
  // Takes the log, whose manifest the caller has seen. `store` outlives the
  // object.
  static absl::StatusOr<std::unique_ptr<LogOwner>> Take(
      store::ObjectStore* store, const SeenManifest& seen,
      const Instance& self);

  uint64_t epoch() const { return epoch_; }
  // Returns the first place after this owner's seal.
  uint64_t first_place() const { return first_place_; }
  SnapshotPlace snapshot() const ABSL_LOCKS_EXCLUDED(mu_);

  // Changes the manifest, so that others see that this owner lives.
  absl::Status Beat();
  // From now on a start reads the snapshot, and the log from its place on.
  // REQUIRES: all earlier records are durable.
  absl::Status NameSnapshot(const SnapshotPlace& snapshot);
  // Says that this owner writes no more.
  absl::Status Release();

  // Returns ABORTED if another process has the log.
  absl::Status fenced() const ABSL_LOCKS_EXCLUDED(mu_);
  // Notes that another process has the log, and returns fenced().
  absl::Status Fence(const Instance& other) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  LogOwner(store::ObjectStore* store, SeenManifest own, uint64_t first_place)
      : store_(*store),
        epoch_(own.manifest.epoch),
        first_place_(first_place),
        own_(std::move(own)) {}

  absl::Status Change(const std::function<void(Manifest&)>& change)
      ABSL_LOCKS_EXCLUDED(mu_, changing_);

  store::ObjectStore& store_;
  const uint64_t epoch_;
  const uint64_t first_place_;
  Mutex changing_;  // One change at a time; held while the store is asked.
  mutable Mutex mu_;
  SeenManifest own_ ABSL_GUARDED_BY(mu_);
  absl::Status fenced_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_LOG_OWNER_H_
