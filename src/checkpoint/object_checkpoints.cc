#include "src/checkpoint/object_checkpoints.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"
#include "src/base/threads/at_once.h"

namespace weft::checkpoint {
namespace {

constexpr char kManifests[] = "checkpoints/";
constexpr char kFiles[] = "checkpoint-files/";
constexpr uint64_t kMaxManifestBytes = 16 << 20;
constexpr uint64_t kPieceBytes = 8 << 20;
// A request to the store is slow, so this many run at once.
constexpr size_t kAtOnce = 16;
// The places that one call of Sweep checks, in up to seven requests each.
constexpr size_t kSweptAtOnce = 4;
// A checkpoint that changes while it is read is read so often.
constexpr int kReads = 3;

std::string ManifestKey(const CheckpointName& name) {
  return absl::StrCat(kManifests, name.adapter_id, "/", name.name);
}

std::string FileKey(const CheckpointName& name, const FolderManifest& manifest,
                    const std::string& file) {
  return absl::StrCat(kFiles, name.adapter_id, "/", name.name, "/",
                      manifest.place, "/", file);
}

// Returns the parts of a key after a prefix.
std::vector<std::string> PartsAfter(std::string_view prefix,
                                    const std::string& key) {
  return absl::StrSplit(key.substr(prefix.size()), '/');
}

// A step that fails with UNAVAILABLE has no result, and runs again when its
// process starts again. But this one ends, and its client may try again.
absl::Status AsResult(const absl::Status& status) {
  if (!store::IsAway(status)) return status;
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "the store of the checkpoints does not answer: ", status.message())),
      {.name = kStoreUnreachable, .values = {}});
}

absl::Status Exists(const CheckpointName& name) {
  return absl::AlreadyExistsError(
      absl::StrCat("\"", name.name, "\" exists already"));
}

}  // namespace

absl::Status ObjectCheckpoints::Write(const CheckpointName& name,
                                      const DurableFolder& folder,
                                      uint64_t /*bytes*/, bool overwrite) {
  FolderManifest manifest{
      .fields = folder.fields,
      .place = absl::StrCat(PlacePrefix(), epoch_, "-", num_places_++),
      .log = log_,
      .epoch = epoch_};
  for (const auto& [file, contents] : folder.files) {
    manifest.files.push_back(DescribeFile(file, contents));
  }
  const absl::Status written =
      AsResult(WriteObjects(name, folder, manifest, overwrite));
  std::vector<FolderManifest>& unsure = unsure_[ManifestKey(name)];
  if (IsUnreachable(written)) {
    unsure.push_back(std::move(manifest));
    return written;
  }
  if (!written.ok()) RemoveFiles(name, manifest);
  if (written.ok()) {
    for (const FolderManifest& earlier : unsure) RemoveFiles(name, earlier);
    unsure.clear();
  }
  if (unsure.empty()) unsure_.erase(ManifestKey(name));
  return written;
}

absl::Status ObjectCheckpoints::WriteObjects(const CheckpointName& name,
                                             const DurableFolder& folder,
                                             const FolderManifest& manifest,
                                             bool overwrite) {
  absl::StatusOr<Stored> before = ReadManifest(name);
  if (absl::IsNotFound(before.status())) {
    before = Stored();
  } else if (!overwrite && !IsUnreachable(before.status()) &&
             !IsUnsure(name, before)) {
    return Exists(name);
  }
  WEFT_RETURN_IF_ERROR(before.status());
  for (const auto& [file, contents] : folder.files) {
    WEFT_RETURN_IF_ERROR(
        store::CreateOnce(store_, FileKey(name, manifest, file), {contents}));
  }
  WEFT_RETURN_IF_ERROR(WriteManifest(name, manifest, *before));
  RemoveFiles(name, before->manifest);
  return absl::OkStatus();
}

bool ObjectCheckpoints::IsUnsure(const CheckpointName& name,
                                 const absl::StatusOr<Stored>& found) const {
  const auto unsure = unsure_.find(ManifestKey(name));
  if (!found.ok() || unsure == unsure_.end()) return false;
  return std::ranges::find(unsure->second, found->manifest.place,
                           &FolderManifest::place) != unsure->second.end();
}

std::string ObjectCheckpoints::PlacePrefix() const {
  return log_ == 0 ? "e" : absl::StrCat("l", log_, "-e");
}

absl::StatusOr<ObjectCheckpoints::Stored> ObjectCheckpoints::ReadManifest(
    const CheckpointName& name) const {
  absl::StatusOr<store::Object> object =
      store_.Get(ManifestKey(name), kMaxManifestBytes);
  if (absl::IsNotFound(object.status())) {
    return absl::NotFoundError(
        absl::StrCat("\"", name.name, "\" does not exist"));
  }
  WEFT_RETURN_IF_ERROR(AsResult(object.status()));
  std::optional<FolderManifest> manifest = ParseManifest(object->bytes);
  if (!manifest || manifest->place.empty()) {
    return DamagedFile(name.name, kManifestFile, "is damaged");
  }
  return Stored{.manifest = *std::move(manifest),
                .etag = std::move(object->etag)};
}

absl::Status ObjectCheckpoints::WriteManifest(const CheckpointName& name,
                                              const FolderManifest& manifest,
                                              const Stored& before) {
  if (before.manifest.log == log_ && before.manifest.epoch > epoch_) {
    return absl::AbortedError(absl::StrCat(
        "a later owner of the log has written checkpoint \"", name.name, "\""));
  }
  WEFT_RETURN_IF_ERROR(check_owner_());
  const std::string bytes = EncodeManifest(manifest);
  const std::string key = ManifestKey(name);
  const absl::Status written =
      before.etag.empty() ? store_.Create(key, {bytes}).status()
                          : store_.Swap(key, bytes, before.etag).status();
  if (!absl::IsAlreadyExists(written) && !absl::IsAborted(written)) {
    return written;
  }
  // What is there may be this one: the answer to an attempt was lost.
  WEFT_ASSIGN_OR_RETURN(const Stored now, ReadManifest(name));
  return EncodeManifest(now.manifest) == bytes ? absl::OkStatus() : written;
}

FileSource ObjectCheckpoints::FileOf(const CheckpointName& name,
                                     const FolderManifest& manifest,
                                     const FolderManifest::File& file) const {
  const auto read = [&store = store_, key = FileKey(name, manifest, file.name),
                     expected = file.size](
                        uint64_t offset,
                        uint64_t count) -> absl::StatusOr<std::string> {
    std::string piece(count, '\0');
    uint64_t size = 0;
    WEFT_ASSIGN_OR_RETURN(const size_t got,
                          store.GetRange(key, offset, piece, &size));
    if (size != expected) {
      return absl::DataLossError(
          absl::StrCat("has ", size, " bytes, not ", expected));
    }
    piece.resize(got);
    return piece;
  };
  return {file.name, file.size, read};
}

absl::StatusOr<DurableFolder> ObjectCheckpoints::Read(
    const CheckpointName& name) const {
  WEFT_ASSIGN_OR_RETURN(Stored stored, ReadManifest(name));
  for (int tries = 1;; ++tries) {
    absl::StatusOr<DurableFolder> folder = ReadFiles(name, stored.manifest);
    if (folder.ok() || IsUnreachable(folder.status()) || tries == kReads) {
      return folder;
    }
    // The owner of another log may have replaced the checkpoint meanwhile.
    WEFT_ASSIGN_OR_RETURN(Stored now, ReadManifest(name));
    if (now.etag == stored.etag) return folder;
    stored = std::move(now);
  }
}

absl::StatusOr<DurableFolder> ObjectCheckpoints::ReadFiles(
    const CheckpointName& name, const FolderManifest& manifest) const {
  DurableFolder folder;
  for (const FolderManifest::File& file : manifest.files) {
    std::string contents;
    const auto keep = [&contents](const std::string& piece) {
      contents += piece;
    };
    WEFT_RETURN_IF_ERROR(AsResult(CheckFile(
        FileOf(name, manifest, file), name.name, file, kPieceBytes, keep)));
    folder.files.emplace_back(file.name, std::move(contents));
  }
  folder.fields = manifest.fields;
  return folder;
}

absl::StatusOr<OpenedFolder> ObjectCheckpoints::Open(
    const CheckpointName& name) const {
  WEFT_ASSIGN_OR_RETURN(Stored stored, ReadManifest(name));
  OpenedFolder folder;
  for (const FolderManifest::File& file : stored.manifest.files) {
    WEFT_ASSIGN_OR_RETURN(
        FileSource checked,
        CheckWhileRead(FileOf(name, stored.manifest, file), name.name, file));
    folder.files.push_back(std::move(checked));
  }
  folder.fields = std::move(stored.manifest.fields);
  return folder;
}

absl::StatusOr<nlohmann::json> ObjectCheckpoints::ReadFields(
    const CheckpointName& name) const {
  WEFT_ASSIGN_OR_RETURN(Stored stored, ReadManifest(name));
  return std::move(stored.manifest.fields);
}

std::vector<absl::StatusOr<nlohmann::json>> ObjectCheckpoints::ReadFieldsOf(
    const std::vector<CheckpointName>& names) const {
  std::vector<absl::StatusOr<nlohmann::json>> fields(names.size());
  RunAtOnce(names.size(), kAtOnce, [&](size_t i) {
    fields[i] = ReadFields(names[i]);
    return absl::OkStatus();
  }).IgnoreError();
  return fields;
}

absl::Status ObjectCheckpoints::ReplaceFields(const CheckpointName& name,
                                              const nlohmann::json& fields) {
  WEFT_ASSIGN_OR_RETURN(const Stored stored, ReadManifest(name));
  FolderManifest manifest = stored.manifest;
  manifest.fields = fields;
  manifest.log = log_;
  manifest.epoch = epoch_;
  return AsResult(WriteManifest(name, manifest, stored));
}

absl::Status ObjectCheckpoints::Remove(const CheckpointName& name) {
  return RemoveIf(name, [](const nlohmann::json&) { return true; });
}

absl::Status ObjectCheckpoints::RemoveIf(
    const CheckpointName& name,
    const std::function<bool(const nlohmann::json&)>& still) {
  const absl::StatusOr<Stored> stored = ReadManifest(name);
  // What is damaged can be removed, too.
  if (!stored.ok() && !absl::IsDataLoss(stored.status())) {
    return stored.status();
  }
  if (stored.ok() && !still(stored->manifest.fields)) {
    return absl::AbortedError("it has changed");
  }
  WEFT_RETURN_IF_ERROR(AsResult(check_owner_()));
  const std::string key = ManifestKey(name);
  if (!stored.ok()) return AsResult(store_.Delete(key));
  // A deletion may arrive late, when a later owner has written the checkpoint
  // anew. So it has a condition. At a store that does not know it, the later
  // owner's checkpoint is gone.
  WEFT_RETURN_IF_ERROR(AsResult(store_.DeleteIf(key, stored->etag)));
  RemoveFiles(name, stored->manifest);
  return absl::OkStatus();
}

void ObjectCheckpoints::RemoveFiles(const CheckpointName& name,
                                    const FolderManifest& manifest) {
  for (const FolderManifest::File& file : manifest.files) {
    const absl::Status removed =
        store_.Delete(FileKey(name, manifest, file.name));
    if (removed.ok()) continue;
    Log(LogLevel::kWarning, "a file of a checkpoint stays",
        {{"name", name.name}, {"reason", removed.message()}});
  }
}

bool ObjectCheckpoints::IsEarlier(const std::string& place) const {
  const std::string prefix = PlacePrefix();
  uint64_t epoch = 0;
  return place.starts_with(prefix) &&
         absl::SimpleAtoi(
             place.substr(prefix.size(),
                          place.find('-', prefix.size()) - prefix.size()),
             &epoch) &&
         epoch < epoch_;
}

absl::StatusOr<ObjectCheckpoints::Places> ObjectCheckpoints::FindSuspects()
    const {
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> files,
                        store_.List(kFiles, "", store::kAllObjects));
  std::map<std::string, std::map<std::string, Place>> places;
  for (const store::ListedObject& file : files) {
    const std::vector<std::string> parts = PartsAfter(kFiles, file.key);
    if (parts.size() != 4) continue;
    const CheckpointName name = {.adapter_id = parts[0], .name = parts[1]};
    Place& place = places[ManifestKey(name)][parts[2]];
    place.name = name;
    place.manifest.place = parts[2];
    place.manifest.files.push_back({.name = parts[3]});
  }
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> manifests,
                        store_.List(kManifests, "", store::kAllObjects));
  std::set<std::string> there;
  for (const store::ListedObject& object : manifests) there.insert(object.key);
  Places suspects;
  for (auto& [key, of_name] : places) {
    // The manifest surely names the only place of a checkpoint.
    if (of_name.size() == 1 && there.contains(key)) continue;
    for (auto& [place, stale] : of_name) {
      if (IsEarlier(place)) suspects.push_back(std::move(stale));
    }
  }
  return suspects;
}

void ObjectCheckpoints::Sweep() {
  if (SteadyNow() < sweep_at_) return;
  if (suspects_.empty()) {
    if (!finding_.valid()) {
      finding_ =
          std::async(std::launch::async, [this] { return FindSuspects(); });
    }
    if (finding_.wait_for(std::chrono::seconds(0)) !=
        std::future_status::ready) {
      return;
    }
    absl::StatusOr<Places> found = finding_.get();
    if (!found.ok()) return PutOffSweep(found.status());
    suspects_ = *std::move(found);
  }
  for (size_t i = 0; i < kSweptAtOnce && !suspects_.empty(); ++i) {
    const absl::Status swept = SweepPlace(suspects_.back());
    if (!swept.ok()) return PutOffSweep(swept);
    suspects_.pop_back();
  }
  if (suspects_.empty()) sweep_at_ = absl::InfiniteFuture();
}

void ObjectCheckpoints::PutOffSweep(const absl::Status& error) {
  Log(LogLevel::kWarning, "files of interrupted saves stay for a while",
      {{"reason", error.message()}});
  sweep_at_ = SteadyNow() + sweep_after_;
}

absl::Status ObjectCheckpoints::SweepPlace(const Place& place) {
  const absl::StatusOr<Stored> now = ReadManifest(place.name);
  if (!now.ok() && !absl::IsNotFound(now.status())) {
    // What is damaged may name the place.
    return absl::IsDataLoss(now.status()) ? absl::OkStatus() : now.status();
  }
  if (now.ok() && now->manifest.place == place.manifest.place) {
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(check_owner_());
  RemoveFiles(place.name, place.manifest);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ListedCheckpoint>> ObjectCheckpoints::List(
    const std::string& adapter_id, bool is_prefix) const {
  const std::string prefix =
      absl::StrCat(kManifests, adapter_id, is_prefix ? "" : "/");
  const absl::StatusOr<std::vector<store::ListedObject>> objects =
      store_.List(prefix, "", store::kAllObjects);
  WEFT_RETURN_IF_ERROR(AsResult(objects.status()));
  std::vector<ListedCheckpoint> found;
  for (const store::ListedObject& object : *objects) {
    const std::vector<std::string> parts = PartsAfter(kManifests, object.key);
    if (parts.size() != 2) continue;
    found.push_back({.name = {.adapter_id = parts[0], .name = parts[1]},
                     .version = object.etag});
  }
  return found;
}

}  // namespace weft::checkpoint
