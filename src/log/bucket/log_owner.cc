#include "src/log/bucket/log_owner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/base/threads/at_once.h"
#include "src/log/bucket/log_object.h"

namespace weft::log {
namespace {

constexpr uint64_t kMaxManifestBytes = 1 << 20;
// A request is slow, and a look at 1000 manifests must end within
// kLookPatience, so this many run at once.
constexpr size_t kLooksAtOnce = 32;

bool IsOf(const Manifest& manifest, const Instance& self, uint64_t epoch) {
  return manifest.owner.process == self.process && manifest.epoch == epoch;
}

absl::Status TakenBy(const Instance& self, const Instance& other) {
  if (self.name == other.name) {
    return absl::AbortedError(absl::StrCat(
        "another process with --instance=", self.name,
        " has taken the log over: give each process a name of its own"));
  }
  return absl::AbortedError(
      absl::StrCat("instance ", other.name, " has taken the log over"));
}

absl::Status TakenMeanwhile() {
  return absl::AbortedError("another process takes the log over");
}

// Writes the manifest, in place of the one that was seen. Returns its ETag.
absl::StatusOr<std::string> Write(store::ObjectStore& store,
                                  const LogKeys& keys, const Manifest& manifest,
                                  const std::string& seen_etag) {
  const std::string bytes = EncodeManifest(manifest);
  return seen_etag.empty() ? store.Create(keys.Manifest(), {bytes})
                           : store.Swap(keys.Manifest(), bytes, seen_etag);
}

bool Lost(const absl::Status& status) {
  return absl::IsAborted(status) || absl::IsAlreadyExists(status);
}

// Returns the manifest if `self` owns the log. Errors: ABORTED otherwise.
absl::StatusOr<SeenManifest> CheckOwner(store::ObjectStore& store,
                                        const LogKeys& keys,
                                        const Instance& self, uint64_t epoch) {
  WEFT_ASSIGN_OR_RETURN(SeenManifest seen, LookAtManifest(store, keys));
  if (IsOf(seen.manifest, self, epoch)) return seen;
  return TakenBy(self, seen.manifest.owner);
}

// Returns the place after the last object of the log.
absl::StatusOr<uint64_t> FindEnd(store::ObjectStore& store, const LogKeys& keys,
                                 uint64_t first) {
  WEFT_ASSIGN_OR_RETURN(
      const std::vector<store::ListedObject> objects,
      store.List(keys.Records(), keys.OfPlace(first - 1), store::kAllObjects));
  return objects.empty() ? first : keys.PlaceOf(objects.back().key) + 1;
}

// Writes a seal of `epoch` at the first free place from `place` on. Returns the
// next place. Errors: ABORTED if a higher epoch has written.
absl::StatusOr<uint64_t> Seal(store::ObjectStore& store, const LogKeys& keys,
                              uint64_t epoch, uint64_t place) {
  const std::string seal = EncodeSeal(epoch);
  for (;; ++place) {
    const std::string key = keys.OfPlace(place);
    const absl::Status sealed = store.Create(key, {seal}).status();
    if (sealed.ok()) return place + 1;
    if (!absl::IsAlreadyExists(sealed)) return sealed;
    const absl::StatusOr<store::Object> there =
        store.Get(key, kMaxLogObjectBytes);
    // Only a later owner, after a snapshot, removes what was there.
    if (absl::IsNotFound(there.status())) return TakenMeanwhile();
    WEFT_RETURN_IF_ERROR(there.status());
    if (there->bytes == seal) return place + 1;  // An answer was lost.
    WEFT_ASSIGN_OR_RETURN(const LogObject object,
                          DecodeLogObject(there->bytes, key));
    if (object.epoch >= epoch) return TakenMeanwhile();
  }
}

}  // namespace

absl::StatusOr<SeenManifest> LookAtManifest(store::ObjectStore& store,
                                            const LogKeys& keys) {
  absl::StatusOr<store::Object> object =
      store.Get(keys.Manifest(), kMaxManifestBytes);
  if (absl::IsNotFound(object.status())) return SeenManifest();
  WEFT_RETURN_IF_ERROR(object.status());
  SeenManifest seen{.etag = std::move(object->etag)};
  absl::StatusOr<Manifest> manifest = DecodeManifest(object->bytes);
  if (!manifest.ok()) {
    return absl::DataLossError(
        absl::StrCat(store.NameOf(keys.Manifest()), " is damaged"));
  }
  seen.manifest = *std::move(manifest);
  return seen;
}

absl::Status Undrain(store::ObjectStore& store, const LogKeys& keys) {
  for (;;) {
    WEFT_ASSIGN_OR_RETURN(SeenManifest seen, LookAtManifest(store, keys));
    if (!seen.manifest.drained) return absl::OkStatus();
    ++seen.manifest.version;
    seen.manifest.drained = false;
    const absl::Status written =
        Write(store, keys, seen.manifest, seen.etag).status();
    if (!Lost(written)) return written;
  }
}

std::vector<absl::StatusOr<SeenManifest>> LookAtManifests(
    store::ObjectStore& store, int num_logs) {
  std::vector<absl::StatusOr<SeenManifest>> seen(num_logs);
  RunAtOnce(seen.size(), kLooksAtOnce, [&](size_t log) {
    seen[log] = LookAtManifest(store, {.log = static_cast<int>(log)});
    return absl::OkStatus();
  }).IgnoreError();
  return seen;
}

LogClaim LogWatch::Look(const SeenManifest& seen, absl::Time now) {
  if (seen.etag != etag_ || now - looked_ > most_gap_) {
    etag_ = seen.etag;
    since_ = now;
  }
  looked_ = now;
  if (seen.etag.empty()) return LogClaim::kFree;
  if (seen.manifest.drained) return LogClaim::kNone;
  if (seen.manifest.owner.name == self_.name) return LogClaim::kOwn;
  if (seen.manifest.released) return LogClaim::kFree;
  return now - since_ >= patience_ ? LogClaim::kOwnerIsDead : LogClaim::kNone;
}

absl::StatusOr<std::unique_ptr<LogOwner>> LogOwner::Take(
    store::ObjectStore* store, const LogKeys& keys, const SeenManifest& seen,
    const Instance& self) {
  SeenManifest own{.manifest = seen.manifest};
  ++own.manifest.epoch;
  ++own.manifest.version;
  own.manifest.owner = self;
  own.manifest.released = false;
  own.manifest.queued_tokens.reset();
  const absl::StatusOr<std::string> etag =
      Write(*store, keys, own.manifest, seen.etag);
  if (!etag.ok() && !Lost(etag.status())) return etag.status();
  if (!etag.ok()) {
    // If the swap seems lost, only its answer may be.
    WEFT_RETURN_IF_ERROR(
        CheckOwner(*store, keys, self, own.manifest.epoch).status());
  }
  const uint64_t first = own.manifest.snapshot.place;
  WEFT_ASSIGN_OR_RETURN(const uint64_t end, FindEnd(*store, keys, first));
  WEFT_ASSIGN_OR_RETURN(const uint64_t place,
                        Seal(*store, keys, own.manifest.epoch, end));
  WEFT_ASSIGN_OR_RETURN(own,
                        CheckOwner(*store, keys, self, own.manifest.epoch));
  return std::unique_ptr<LogOwner>(
      new LogOwner(store, keys, std::move(own), place));
}

SnapshotPlace LogOwner::snapshot() const {
  MutexLock lock(&mu_);
  return own_.manifest.snapshot;
}

absl::Status LogOwner::Beat(std::optional<uint64_t> queued_tokens) {
  return Change([queued_tokens](Manifest& manifest) {
    manifest.queued_tokens = queued_tokens;
  });
}

absl::Status LogOwner::Confirm() const {
  WEFT_RETURN_IF_ERROR(fenced());
  Instance self;
  {
    MutexLock lock(&mu_);
    self = own_.manifest.owner;
  }
  return CheckOwner(store_, keys_, self, epoch_).status();
}

absl::Status LogOwner::NameSnapshot(const SnapshotPlace& snapshot) {
  return Change(
      [&snapshot](Manifest& manifest) { manifest.snapshot = snapshot; });
}

absl::Status LogOwner::Release(bool drained) {
  return Change([drained](Manifest& manifest) {
    manifest.released = true;
    manifest.queued_tokens.reset();
    manifest.drained = drained;
  });
}

absl::Status LogOwner::fenced() const {
  MutexLock lock(&mu_);
  return fenced_;
}

absl::Status LogOwner::Fence(const Instance& other) {
  MutexLock lock(&mu_);
  if (fenced_.ok()) fenced_ = TakenBy(own_.manifest.owner, other);
  return fenced_;
}

absl::Status LogOwner::Change(const std::function<void(Manifest&)>& change) {
  MutexLock one(&changing_);
  for (;;) {
    WEFT_RETURN_IF_ERROR(fenced());
    SeenManifest next;
    std::string etag;
    {
      MutexLock lock(&mu_);
      next.manifest = own_.manifest;
      etag = own_.etag;
    }
    ++next.manifest.version;
    change(next.manifest);
    const absl::StatusOr<std::string> written =
        Write(store_, keys_, next.manifest, etag);
    if (written.ok()) {
      next.etag = *written;
    } else if (Lost(written.status())) {
      // This change, or an earlier one whose answer was lost, may be there.
      WEFT_ASSIGN_OR_RETURN(SeenManifest seen, LookAtManifest(store_, keys_));
      if (!IsOf(seen.manifest, next.manifest.owner, epoch_)) {
        return Fence(seen.manifest.owner);
      }
      const bool is_this =
          EncodeManifest(seen.manifest) == EncodeManifest(next.manifest);
      next = std::move(seen);
      if (!is_this) {
        MutexLock lock(&mu_);
        own_ = std::move(next);
        continue;
      }
    } else {
      return written.status();
    }
    MutexLock lock(&mu_);
    own_ = std::move(next);
    return absl::OkStatus();
  }
}

}  // namespace weft::log
