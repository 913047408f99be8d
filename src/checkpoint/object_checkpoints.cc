#include "src/checkpoint/object_checkpoints.h"

#include <algorithm>
#include <future>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::checkpoint {
namespace {

constexpr char kManifests[] = "checkpoints/";
constexpr char kFiles[] = "checkpoint-files/";
constexpr uint64_t kMaxManifestBytes = 16 << 20;
constexpr uint64_t kPieceBytes = 8 << 20;
// A request to the store is slow, so this many run at once.
constexpr size_t kAtOnce = 16;
constexpr char kStoreUnreachable[] = "CHECKPOINT_STORE_UNREACHABLE";

std::string ManifestKey(const CheckpointName& name) {
  return absl::StrCat(kManifests, name.adapter_id, "/", name.name);
}

std::string FileKey(const CheckpointName& name, const FolderManifest& manifest,
                    const std::string& file) {
  return absl::StrCat(kFiles, name.adapter_id, "/", name.name, "/",
                      manifest.place, "/", file);
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

// Returns whether AsResult says that the store is away.
bool IsAwayResult(const absl::Status& result) {
  const std::optional<Reason> reason = FindReason(result);
  return reason && reason->name == kStoreUnreachable;
}

absl::Status Exists(const CheckpointName& name) {
  return absl::AlreadyExistsError(
      absl::StrCat("\"", name.name, "\" exists already"));
}

}  // namespace

absl::Status ObjectCheckpoints::Write(const CheckpointName& name,
                                      const DurableFolder& folder,
                                      uint64_t /*bytes*/, bool overwrite) {
  FolderManifest manifest{.fields = folder.fields,
                          .place = NewPlace(),
                          .log = log_,
                          .epoch = epoch_};
  for (const auto& [file, contents] : folder.files) {
    manifest.files.push_back(DescribeFile(file, contents));
  }
  // A step that saves has been accepted, so it waits for a store that is away
  // for a short while. New steps are refused meanwhile.
  const absl::Time until = SteadyNow() + patience_;
  for (;;) {
    const absl::Status written =
        AsResult(WriteObjects(name, folder, manifest, overwrite));
    if (IsAwayResult(written) && SteadyNow() < until) continue;
    // If the store is away, the manifest may be there, or come.
    if (!written.ok() && !IsAwayResult(written)) RemoveFiles(name, manifest);
    return written;
  }
}

absl::Status ObjectCheckpoints::WriteObjects(const CheckpointName& name,
                                             const DurableFolder& folder,
                                             const FolderManifest& manifest,
                                             bool overwrite) {
  absl::StatusOr<Stored> before = ReadManifest(name);
  if (absl::IsNotFound(before.status())) {
    before = Stored();
  } else if (before.ok() && before->manifest.place == manifest.place) {
    return absl::OkStatus();  // The answer to an earlier try was lost.
  } else if (!overwrite && !IsAwayResult(before.status())) {
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

std::string ObjectCheckpoints::NewPlace() {
  const std::string log = log_ == 0 ? "" : absl::StrCat("l", log_, "-");
  return absl::StrCat(log, "e", epoch_, "-", num_places_++);
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

absl::StatusOr<FileSource> ObjectCheckpoints::OpenFile(
    const CheckpointName& name, const FolderManifest& manifest,
    const FolderManifest::File& file, uint64_t piece_bytes,
    const std::function<void(std::string)>& use) const {
  const auto read = [&store = store_, key = FileKey(name, manifest, file.name)](
                        uint64_t offset,
                        uint64_t count) -> absl::StatusOr<std::string> {
    std::string piece(count, '\0');
    uint64_t size = 0;
    WEFT_ASSIGN_OR_RETURN(const size_t got,
                          store.GetRange(key, offset, piece, &size));
    piece.resize(got);
    return piece;
  };
  const FileSource source(file.name, file.size, read);
  WEFT_RETURN_IF_ERROR(
      AsResult(CheckFile(source, name.name, file, piece_bytes, use)));
  return source;
}

absl::StatusOr<DurableFolder> ObjectCheckpoints::Read(
    const CheckpointName& name) const {
  WEFT_ASSIGN_OR_RETURN(Stored stored, ReadManifest(name));
  DurableFolder folder;
  for (const FolderManifest::File& file : stored.manifest.files) {
    std::string contents;
    const auto keep = [&contents](const std::string& piece) {
      contents += piece;
    };
    WEFT_RETURN_IF_ERROR(
        OpenFile(name, stored.manifest, file, kPieceBytes, keep).status());
    folder.files.emplace_back(file.name, std::move(contents));
  }
  folder.fields = std::move(stored.manifest.fields);
  return folder;
}

absl::StatusOr<OpenedFolder> ObjectCheckpoints::Open(
    const CheckpointName& name) const {
  WEFT_ASSIGN_OR_RETURN(Stored stored, ReadManifest(name));
  OpenedFolder folder;
  for (const FolderManifest::File& file : stored.manifest.files) {
    WEFT_ASSIGN_OR_RETURN(FileSource opened,
                          OpenFile(name, stored.manifest, file, kPieceBytes,
                                   [](const std::string&) {}));
    folder.files.push_back(std::move(opened));
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
  std::vector<absl::StatusOr<nlohmann::json>> fields;
  fields.reserve(names.size());
  for (size_t first = 0; first < names.size(); first += kAtOnce) {
    std::vector<std::future<absl::StatusOr<nlohmann::json>>> coming;
    const size_t end = std::min(names.size(), first + kAtOnce);
    for (size_t i = first; i < end; ++i) {
      coming.push_back(std::async(std::launch::async, [this, &name = names[i]] {
        return ReadFields(name);
      }));
    }
    for (auto& one : coming) fields.push_back(one.get());
  }
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
  const absl::StatusOr<Stored> stored = ReadManifest(name);
  // What is damaged can be removed, too.
  if (!stored.ok() && !absl::IsDataLoss(stored.status())) {
    return stored.status();
  }
  WEFT_RETURN_IF_ERROR(AsResult(check_owner_()));
  WEFT_RETURN_IF_ERROR(AsResult(store_.Delete(ManifestKey(name))));
  if (stored.ok()) RemoveFiles(name, stored->manifest);
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

absl::StatusOr<std::vector<ListedCheckpoint>> ObjectCheckpoints::List(
    const std::string& adapter_id, bool is_prefix) const {
  const std::string prefix =
      absl::StrCat(kManifests, adapter_id, is_prefix ? "" : "/");
  WEFT_ASSIGN_OR_RETURN(const std::vector<store::ListedObject> objects,
                        store_.List(prefix, "", store::kAllObjects));
  std::vector<ListedCheckpoint> found;
  for (const store::ListedObject& object : objects) {
    const std::vector<std::string> parts =
        absl::StrSplit(object.key.substr(sizeof(kManifests) - 1), '/');
    if (parts.size() != 2) continue;
    found.push_back({.name = {.adapter_id = parts[0], .name = parts[1]},
                     .version = object.etag});
  }
  return found;
}

}  // namespace weft::checkpoint
