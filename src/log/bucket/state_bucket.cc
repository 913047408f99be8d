#include "src/log/bucket/state_bucket.h"

#include <algorithm>
#include <functional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/base/threads/at_once.h"
#include "src/log/bucket/log_object.h"
#include "src/log/log_format.h"
#include "src/log/log_summary.h"
#include "src/log/record.h"
#include "src/log/state_format.h"
#include "src/store/open_store.h"

namespace weft::log {
namespace {

constexpr char kFormat[] = "FORMAT";
constexpr char kFirstLog[] = "logs/0/";
constexpr uint64_t kMaxFormatBytes = 1 << 20;
constexpr uint64_t kMaxSnapshotBytes = uint64_t{16} << 30;
// The table of an image, and small images, come with one request. Then so many
// bytes come with one, for the blocks that follow.
constexpr uint64_t kFirstBytes = 64 << 10;
constexpr uint64_t kAheadBytes = 64 << 20;
// A log has many objects, and the owner's end waits for their removal, so this
// many are removed at once.
constexpr size_t kRemovals = 16;
// A snapshot waits so long for the records before it.
constexpr absl::Duration kRecordsTimeout = absl::Seconds(5);

// Returns the epoch with which the name of a snapshot or an image begins; 0 if
// it has none.
uint64_t EpochOf(const std::string& name) {
  uint64_t epoch = 0;
  const bool has_epoch =
      absl::StartsWith(name, "e") &&
      absl::SimpleAtoi(name.substr(1, name.find('-') - 1), &epoch);
  return has_epoch ? epoch : 0;
}

// Returns the number after the epoch; 0 if there is none.
uint64_t SequenceOf(const std::string& name) {
  uint64_t sequence = 0;
  const size_t dash = name.find('-');
  const bool has_one = dash != std::string::npos &&
                       absl::SimpleAtoi(name.substr(dash + 1), &sequence);
  return has_one ? sequence : 0;
}

class ObjectImageReader : public ImageReader {
 public:
  ObjectImageReader(store::ObjectStore* store, std::string key)
      : store_(*store), key_(std::move(key)) {}

  absl::Status Open() { return Fetch(0, kFirstBytes); }

  absl::StatusOr<size_t> Read(uint64_t offset, std::span<char> bytes) override {
    const uint64_t wanted =
        std::min<uint64_t>(bytes.size(), size_ - std::min(offset, size_));
    if (wanted == 0) return 0;
    if (wanted > kAheadBytes) {
      return store_.GetRange(key_, offset, bytes.first(wanted), &size_);
    }
    if (offset < begin_ || offset + wanted > begin_ + ahead_.size()) {
      WEFT_RETURN_IF_ERROR(
          Fetch(offset, std::min(kAheadBytes, size_ - offset)));
    }
    return ahead_.copy(bytes.data(), wanted, offset - begin_);
  }

  absl::StatusOr<uint64_t> Size() override { return size_; }

 private:
  absl::Status Fetch(uint64_t offset, uint64_t count) {
    begin_ = offset;
    ahead_.resize(count);
    WEFT_ASSIGN_OR_RETURN(const size_t read,
                          store_.GetRange(key_, offset, ahead_, &size_));
    ahead_.resize(read);
    return absl::OkStatus();
  }

  store::ObjectStore& store_;
  const std::string key_;
  std::string ahead_;  // The bytes from `begin_` on.
  uint64_t begin_ = 0;
  uint64_t size_ = 0;
};

absl::Status Missing(const store::ObjectStore& store, const std::string& key) {
  return absl::DataLossError(absl::StrCat(store.NameOf(key), " is missing"));
}

// Checks that no object is below the prefix but those with which a process that
// starts checks the store. Errors: FAILED_PRECONDITION; DATA_LOSS if the
// objects are a state without FORMAT.
absl::Status CheckEmpty(store::ObjectStore& store) {
  constexpr size_t kSome = 100;
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> objects,
                        store.List("", "", kSome));
  for (const store::ListedObject& object : objects) {
    if (absl::StartsWith(object.key, store::kProbePrefix)) continue;
    WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> owners,
                          store.List(kOwnersPrefix, "", kSome));
    if (!owners.empty() || absl::StartsWith(object.key, kFirstLog)) {
      return absl::DataLossError(absl::StrCat(
          store.NameOf(kFormat), " is missing, and ", object.key,
          " is there: somebody has deleted it, or a copy has not ended"));
    }
    return absl::FailedPreconditionError(absl::StrCat(
        store.NameOf(object.key),
        " is there, and a new state begins below a prefix without objects: "
        "name another prefix"));
  }
  return absl::OkStatus();
}

// Errors: DATA_LOSS.
absl::StatusOr<std::optional<SnapshotFile>> GetSnapshot(
    store::ObjectStore& store, const LogKeys& keys,
    const SnapshotPlace& newest) {
  if (newest.name.empty()) return std::nullopt;
  const std::string key = keys.Snapshots() + newest.name;
  absl::StatusOr<store::Object> file = store.Get(key, kMaxSnapshotBytes);
  if (absl::IsNotFound(file.status())) return Missing(store, key);
  WEFT_RETURN_IF_ERROR(file.status());
  return DecodeSnapshotFile(newest.next_sequence, std::move(file->bytes),
                            store.NameOf(key));
}

// Looks for the images that a snapshot names. Errors: DATA_LOSS.
absl::Status FindImages(store::ObjectStore& store, const LogKeys& keys,
                        const std::optional<SnapshotFile>& file) {
  WEFT_ASSIGN_OR_RETURN(const Snapshot snapshot, ToSnapshot(file));
  if (snapshot.adapters.empty()) return absl::OkStatus();
  const std::string prefix = keys.Images();
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> objects,
                        store.List(prefix, "", store::kAllObjects));
  std::set<std::string> images;
  for (const store::ListedObject& object : objects) images.insert(object.key);
  for (const StoredAdapter& adapter : snapshot.adapters) {
    if (!adapter.image) continue;
    const std::string key = prefix + adapter.image->file;
    if (!images.contains(key)) return Missing(store, key);
  }
  return absl::OkStatus();
}

// Looks for objects that are missing, before a process writes that it has the
// log. Returns the newest snapshot; none if there is none. Errors: DATA_LOSS.
absl::StatusOr<std::optional<SnapshotFile>> CheckWhole(
    store::ObjectStore& store, const LogKeys& keys, const SeenManifest& seen) {
  const SnapshotPlace& newest = seen.manifest.snapshot;
  WEFT_ASSIGN_OR_RETURN(std::optional<SnapshotFile> snapshot,
                        GetSnapshot(store, keys, newest));
  WEFT_RETURN_IF_ERROR(FindImages(store, keys, snapshot));
  // Without a manifest there may be no log, either.
  if (!seen.etag.empty()) {
    WEFT_RETURN_IF_ERROR(
        ObjectLogReader::Open(&store, keys, newest.place, newest.next_sequence)
            .status());
    return snapshot;
  }
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> records,
                        store.List(keys.Records(), "", store::kAllObjects));
  if (!records.empty()) return Missing(store, keys.Manifest());
  return snapshot;
}

// Leaves a log alone that is damaged, and says so. Returns `damage` if no log
// is left.
absl::Status Leave(int log, const absl::Status& damage,
                   std::vector<LogWatch>* watches) {
  (*watches)[log].Leave();
  if (std::ranges::all_of(*watches, &LogWatch::left)) return damage;
  Log(LogLevel::kError, "a log of the state is damaged, and nobody can have it",
      {{"log", log}, {"error", damage.message()}});
  return absl::OkStatus();
}

// Each log's manifest, and what a process may do about it; none for a log that
// it leaves alone.
using Looks = std::vector<absl::StatusOr<SeenManifest>>;
using Claims = std::vector<std::optional<LogClaim>>;

// Has new logs begin with higher epochs than those of all others. Checkpoints
// that were copied with log 0 may have been written by another state's owners
// of any log; the epochs of log 0 are higher than theirs (Begin).
void BeginAfterAll(Looks* seen) {
  uint64_t highest = 0;
  for (const auto& one : *seen) {
    if (one.ok()) highest = std::max(highest, one->manifest.epoch);
  }
  for (auto& one : *seen) {
    if (one.ok() && one->etag.empty()) one->manifest.epoch = highest;
  }
}

// Returns the manifest of an owner that lives. Instances begin at different
// logs, so that their clients do not all go to one owner.
Manifest LivingOwner(const Instance& self, const Claims& claims,
                     const Looks& seen) {
  const size_t first = Crc32c(self.name) % seen.size();
  for (size_t i = 0; i < seen.size(); ++i) {
    const size_t log = (first + i) % seen.size();
    if (claims[log] != LogClaim::kNone) continue;
    if (!seen[log]->manifest.released) return seen[log]->manifest;
  }
  return {};
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateBucket>> StateBucket::Open(
    std::unique_ptr<store::ObjectStore> store,
    const std::optional<std::string>& model, bool accept_change) {
  std::unique_ptr<StateBucket> bucket(new StateBucket(std::move(store)));
  WEFT_RETURN_IF_ERROR(bucket->CheckFormat(model, accept_change));
  return bucket;
}

absl::StatusOr<std::unique_ptr<StateBucket>> StateBucket::Begin(
    std::unique_ptr<store::ObjectStore> store, std::string model,
    const Instance& self) {
  WEFT_RETURN_IF_ERROR(CheckEmpty(*store));
  std::unique_ptr<StateBucket> bucket(new StateBucket(std::move(store)));
  bucket->model_ = std::move(model);
  // Images, and checkpoints that follow them, have names with epochs of other
  // stores. New names must differ, so the epochs go on from the seconds since
  // 1970, which pass faster than owners.
  const SeenManifest none{.manifest = {.epoch = static_cast<uint64_t>(
                                           absl::ToUnixSeconds(absl::Now()))}};
  WEFT_ASSIGN_OR_RETURN(
      bucket->owner_,
      LogOwner::Take(bucket->store_.get(), bucket->keys_, none, self));
  return bucket;
}

absl::Status StateBucket::Finish() {
  // Without a clock that is right, too, no image may get the name of another.
  const std::string prefix = keys_.Images();
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> images,
                        store_->List(prefix, "", store::kAllObjects));
  uint64_t highest = 0;
  for (const store::ListedObject& image : images) {
    highest = std::max(highest, EpochOf(image.key.substr(prefix.size())));
  }
  if (highest > owner_->epoch()) {
    WEFT_RETURN_IF_ERROR(owner_->Beat());  // The log is still this process's.
    WEFT_ASSIGN_OR_RETURN(SeenManifest seen, LookAtManifest(*store_, keys_));
    seen.manifest.epoch = highest;
    const Instance self = seen.manifest.owner;
    WEFT_ASSIGN_OR_RETURN(owner_,
                          LogOwner::Take(store_.get(), keys_, seen, self));
  }
  WEFT_RETURN_IF_ERROR(owner_->Release());
  const std::string format = EncodeFormat(model_);
  const absl::Status created = store_->Create(kFormat, {format}).status();
  if (!absl::IsAlreadyExists(created)) return created;
  WEFT_ASSIGN_OR_RETURN(const store::Object there,
                        store_->Get(kFormat, kMaxFormatBytes));
  // If it is the same, an answer was lost.
  return there.bytes == format ? absl::OkStatus() : created;
}

absl::Status StateBucket::CheckFormat(const std::optional<std::string>& model,
                                      bool accept_change) {
  absl::StatusOr<store::Object> format = store_->Get(kFormat, kMaxFormatBytes);
  if (model && absl::IsNotFound(format.status())) {
    absl::Status begun = CheckEmpty(*store_);
    if (begun.ok()) {
      begun = store_->Create(kFormat, {EncodeFormat(*model)}).status();
    }
    format = store_->Get(kFormat, kMaxFormatBytes);
    // Another process may have begun at the same time.
    if (!begun.ok() && absl::IsNotFound(format.status())) return begun;
  }
  if (absl::IsNotFound(format.status())) {
    return absl::NotFoundError(absl::StrCat(
        store_->NameOf(""), " has no state: ", store_->NameOf(kFormat),
        " is missing"));
  }
  WEFT_RETURN_IF_ERROR(format.status());
  WEFT_ASSIGN_OR_RETURN(const std::string stored, DecodeFormat(format->bytes));
  model_ = model.value_or(stored);
  if (stored == model_) return absl::OkStatus();
  if (!accept_change) return OtherModel(stored, model_);
  return store_->Swap(kFormat, EncodeFormat(*model), format->etag).status();
}

absl::StatusOr<std::vector<int>> StateBucket::ListLogs() const {
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> objects,
                        store_->List(kOwnersPrefix, "", store::kAllObjects));
  std::vector<int> logs;
  for (const store::ListedObject& object : objects) {
    const std::optional<int> log = LogOfManifest(object.key);
    if (log) logs.push_back(*log);
  }
  if (logs.empty()) logs.push_back(0);
  std::ranges::sort(logs);  // The store has 10 before 9.
  return logs;
}

absl::Status StateBucket::CheckLogs(int num_logs) const {
  WEFT_ASSIGN_OR_RETURN(std::vector<int> logs, ListLogs());
  for (; !logs.empty() && logs.back() >= num_logs; logs.pop_back()) {
    const LogKeys keys{.log = logs.back()};
    const absl::StatusOr<SeenManifest> seen = LookAtManifest(*store_, keys);
    if (!seen.ok() && !absl::IsDataLoss(seen.status())) return seen.status();
    if (seen.ok() && seen->manifest.drained) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "--logs=", num_logs, ": the state has ",
        store_->NameOf(keys.Manifest()),
        ", so it has more logs: give each process --logs=", logs.back() + 1));
  }
  return absl::OkStatus();
}

absl::Status StateBucket::SelectLog(std::optional<int> log) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<int> logs, ListLogs());
  const std::string there = absl::StrCat(store_->NameOf(""), " has the logs ",
                                         absl::StrJoin(logs, ", "));
  if (!log && logs.size() > 1) {
    return absl::FailedPreconditionError(absl::StrCat(there, ": name one"));
  }
  keys_.log = log.value_or(logs.front());
  if (std::ranges::find(logs, keys_.log) != logs.end()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(there, ", and not ", keys_.log));
}

absl::StatusOr<bool> StateBucket::TryTake(const Instance& self,
                                          std::vector<LogWatch>* watches) {
  const int num_logs = static_cast<int>(watches->size());
  Looks seen = LookAtManifests(*store_, num_logs);
  Claims claims(num_logs);
  std::vector<int> logs;  // Those that this process may try to take.
  for (int log = 0; log < num_logs; ++log) {
    if ((*watches)[log].left()) continue;
    if (absl::IsDataLoss(seen[log].status())) {
      WEFT_RETURN_IF_ERROR(Leave(log, seen[log].status(), watches));
      continue;
    }
    WEFT_RETURN_IF_ERROR(seen[log].status());
    claims[log] = (*watches)[log].Look(*seen[log], SteadyNow());
    if (claims[log] != LogClaim::kNone) logs.push_back(log);
  }
  seen_ = LivingOwner(self, claims, seen);
  BeginAfterAll(&seen);
  std::ranges::stable_sort(logs, std::greater(),
                           [&claims](int log) { return claims[log]; });
  for (const int log : logs) {
    const absl::StatusOr<bool> taken = Take(self, {.log = log}, *seen[log]);
    if (absl::IsDataLoss(taken.status())) {
      WEFT_RETURN_IF_ERROR(Leave(log, taken.status(), watches));
      continue;
    }
    // The manifest may name this process, so it tries no other log before it
    // knows.
    WEFT_RETURN_IF_ERROR(taken.status());
    if (*taken) return true;
  }
  return false;
}

absl::StatusOr<bool> StateBucket::Take(const Instance& self,
                                       const LogKeys& keys,
                                       const SeenManifest& seen) {
  absl::StatusOr<std::optional<SnapshotFile>> snapshot =
      CheckWhole(*store_, keys, seen);
  if (!snapshot.ok()) {
    // An owner that lives may have removed what it needs no more.
    WEFT_ASSIGN_OR_RETURN(const SeenManifest now,
                          LookAtManifest(*store_, keys));
    if (now.etag != seen.etag) return false;
    return snapshot.status();
  }
  absl::StatusOr<std::unique_ptr<LogOwner>> owner =
      LogOwner::Take(store_.get(), keys, seen, self);
  if (absl::IsAborted(owner.status())) return false;  // Another was faster.
  WEFT_RETURN_IF_ERROR(owner.status());
  owner_ = *std::move(owner);
  keys_ = keys;
  snapshot_ = *std::move(snapshot);
  return true;
}

void StateBucket::StartBeats(OwnerMetrics* metrics) {
  beats_ = std::make_unique<HeartbeatThread>(owner_.get(), metrics);
}

absl::Status StateBucket::failure() const {
  return owner_ == nullptr ? absl::OkStatus() : owner_->fenced();
}

bool StateBucket::answers() const {
  return beats_ == nullptr || beats_->store_answers();
}

absl::Status StateBucket::CheckAnswers() const {
  if (answers()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(store_->NameOf(""), " does not answer"));
}

absl::Status StateBucket::Release(bool drained) {
  if (owner_ == nullptr) return absl::OkStatus();
  beats_.reset();
  return owner_->Release(drained);
}

absl::StatusOr<SnapshotPlace> StateBucket::Newest() const {
  if (owner_ != nullptr) return owner_->snapshot();
  WEFT_ASSIGN_OR_RETURN(const SeenManifest seen,
                        LookAtManifest(*store_, keys_));
  return seen.manifest.snapshot;
}

absl::StatusOr<std::unique_ptr<LogReader>> StateBucket::OpenLog(
    uint64_t first_sequence) const {
  WEFT_ASSIGN_OR_RETURN(const SnapshotPlace newest, Newest());
  if (first_sequence != newest.next_sequence) {
    return absl::FailedPreconditionError(
        absl::StrCat("the log in the store begins with record ",
                     newest.next_sequence, ", not with ", first_sequence));
  }
  return ObjectLogReader::Open(store_.get(), keys_, newest.place,
                               first_sequence);
}

absl::StatusOr<std::unique_ptr<LogSink>> StateBucket::ContinueLog(
    uint64_t next_sequence) {
  auto writer =
      std::make_unique<ObjectLogWriter>(store_.get(), owner_.get(), &places_);
  WEFT_RETURN_IF_ERROR(writer->BeginSegment(next_sequence));
  return writer;
}

absl::Duration StateBucket::ReadTime() const {
  // A GET takes some milliseconds, and a start reads every object twice, 16 at
  // once. Few records share an object while few clients train.
  return absl::Milliseconds(1);
}

absl::Status StateBucket::CheckRoom(uint64_t /*reserve*/) const {
  return absl::OkStatus();
}

absl::StatusOr<std::optional<SnapshotFile>> StateBucket::ReadSnapshot() const {
  WEFT_ASSIGN_OR_RETURN(const SnapshotPlace newest, Newest());
  std::optional<SnapshotFile> taken = std::exchange(snapshot_, std::nullopt);
  if (taken && taken->next_sequence == newest.next_sequence) return taken;
  return GetSnapshot(*store_, keys_, newest);
}

absl::Status StateBucket::WriteSnapshot(const SnapshotFile& snapshot) {
  const uint64_t newest = owner_->snapshot().next_sequence;
  if (newest > snapshot.next_sequence) {
    return absl::FailedPreconditionError(
        absl::StrCat("a snapshot of the records before ", newest, " exists"));
  }
  // A snapshot in the manifest replaces the records before it, so they must be
  // in the store: else the owner's end would lose or repeat them.
  WEFT_ASSIGN_OR_RETURN(const uint64_t place,
                        places_.Wait(snapshot.next_sequence, kRecordsTimeout));
  const std::string name =
      absl::StrCat("e", owner_->epoch(), "-", snapshot.next_sequence);
  WEFT_RETURN_IF_ERROR(
      store::CreateOnce(*store_, keys_.Snapshots() + name,
                        {SnapshotHeader(snapshot.next_sequence, snapshot.bytes),
                         snapshot.bytes}));
  return owner_->NameSnapshot(
      {.name = name, .next_sequence = snapshot.next_sequence, .place = place});
}

absl::Status StateBucket::Cut(uint64_t next_sequence,
                              const std::set<std::string>& keep_images) {
  const SnapshotPlace newest = owner_->snapshot();
  if (newest.next_sequence < next_sequence) {
    return absl::FailedPreconditionError(absl::StrCat(
        "no snapshot contains all records before ", next_sequence));
  }
  // A seal stays for ever: where it was, an earlier owner that wakes could
  // write, and answer what no start would find. The last object stays, too.
  WEFT_RETURN_IF_ERROR(
      RemoveIf(keys_.Records(), [&](const store::ListedObject& object) {
        return keys_.PlaceOf(object.key) + 1 < newest.place &&
               object.size != LogObject::kSealBytes;
      }));
  const std::string groups = keys_.Groups();
  WEFT_RETURN_IF_ERROR(RemoveIf(groups, [&](const store::ListedObject& object) {
    const std::string name = object.key.substr(groups.size());
    return EpochOf(name) <= owner_->epoch() &&
           SequenceOf(name) < newest.next_sequence;
  }));
  const auto removes = [this](const std::string& prefix, const auto& keeps) {
    return RemoveIf(prefix, [&](const store::ListedObject& object) {
      const std::string name = object.key.substr(prefix.size());
      return !keeps(name) && EpochOf(name) <= owner_->epoch();
    });
  };
  WEFT_RETURN_IF_ERROR(removes(
      keys_.Snapshots(),
      [&newest](const std::string& name) { return name == newest.name; }));
  return removes(keys_.Images(), [&keep_images](const std::string& name) {
    return keep_images.contains(name);
  });
}

template <typename Removes>
absl::Status StateBucket::RemoveIf(const std::string& prefix,
                                   const Removes& removes) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> objects,
                        store_->List(prefix, "", store::kAllObjects));
  return RunAtOnce(objects.size(), kRemovals, [&](size_t i) {
    if (!removes(objects[i])) return absl::OkStatus();
    WEFT_RETURN_IF_ERROR(owner_->fenced());
    return store_->Delete(objects[i].key);
  });
}

std::string StateBucket::NewImageName() {
  return absl::StrCat("e", owner_->epoch(), "-", num_images_.fetch_add(1));
}

absl::Status StateBucket::CreateImage(
    const std::string& name, const std::vector<std::string_view>& pieces) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  WEFT_RETURN_IF_ERROR(CheckAnswers());
  return store::CreateOnce(*store_, keys_.Images() + name, pieces);
}

absl::StatusOr<std::unique_ptr<ImageReader>> StateBucket::OpenImage(
    const std::string& name) const {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  WEFT_RETURN_IF_ERROR(CheckAnswers());
  auto image =
      std::make_unique<ObjectImageReader>(store_.get(), keys_.Images() + name);
  WEFT_RETURN_IF_ERROR(image->Open());
  return image;
}

absl::Status StateBucket::CopyImage(int log, const std::string& from,
                                    const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(from));
  WEFT_RETURN_IF_ERROR(CheckAnswers());
  ObjectImageReader image(store_.get(), LogKeys{.log = log}.Images() + from);
  WEFT_RETURN_IF_ERROR(image.Open());
  WEFT_ASSIGN_OR_RETURN(const uint64_t size, image.Size());
  std::string bytes(size, '\0');
  WEFT_ASSIGN_OR_RETURN(const size_t read, image.Read(0, bytes));
  if (read < size) return absl::DataLossError(absl::StrCat(from, " is cut"));
  return CreateImage(name, {bytes});
}

absl::Status StateBucket::RemoveImage(const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  WEFT_RETURN_IF_ERROR(CheckAnswers());
  return store_->Delete(keys_.Images() + name);
}

}  // namespace weft::log
