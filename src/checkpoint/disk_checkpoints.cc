#include "src/checkpoint/disk_checkpoints.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <optional>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "src/base/files/disk_room.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::checkpoint {

bool IsUnreachable(const absl::Status& status) {
  const std::optional<Reason> reason = FindReason(status);
  return reason && reason->name == kStoreUnreachable;
}

absl::Status CheckpointFiles::RemoveIf(
    const CheckpointName& name,
    const std::function<bool(const nlohmann::json& fields)>& still) {
  WEFT_ASSIGN_OR_RETURN(const nlohmann::json fields, ReadFields(name));
  if (!still(fields)) return absl::AbortedError("it has changed");
  return Remove(name);
}

std::vector<absl::StatusOr<nlohmann::json>> CheckpointFiles::ReadFieldsOf(
    const std::vector<CheckpointName>& names) const {
  std::vector<absl::StatusOr<nlohmann::json>> fields;
  fields.reserve(names.size());
  for (const CheckpointName& name : names) fields.push_back(ReadFields(name));
  return fields;
}

void DiskCheckpoints::RemoveStaleFiles() {
  for (const std::string& adapter : AdapterNames("")) {
    if (const absl::Status status = RemoveStaleTemporaries(AdapterDir(adapter));
        !status.ok()) {
      Log(LogLevel::kWarning, "stale files stay",
          {{"reason", status.message()}});
    }
  }
}

absl::Status DiskCheckpoints::Write(const CheckpointName& name,
                                    const DurableFolder& folder, uint64_t bytes,
                                    bool overwrite) {
  const std::string parent = AdapterDir(name.adapter_id);
  std::error_code ignored;  // Then the next call fails.
  std::filesystem::create_directories(folder_, ignored);
  if (::mkdir(parent.c_str(), 0700) != 0 && errno != EEXIST) {
    return ErrnoStatus(errno, "making the adapter's folder");
  }
  absl::Status written =
      CheckDiskRoom(parent, "the checkpoints", bytes, disk_reserve_);
  if (written.ok()) {
    written = WriteDurableFolder(parent, name.name, folder, overwrite);
  }
  if (!written.ok()) RemoveIfEmpty(name.adapter_id);
  if (absl::IsResourceExhausted(written)) {
    return WithReason(written, {.name = "CHECKPOINT_DISK_FULL", .values = {}});
  }
  return written;
}

absl::StatusOr<DurableFolder> DiskCheckpoints::Read(
    const CheckpointName& name) const {
  return ReadDurableFolder(AdapterDir(name.adapter_id), name.name);
}

absl::StatusOr<OpenedFolder> DiskCheckpoints::Open(
    const CheckpointName& name) const {
  return OpenDurableFolder(AdapterDir(name.adapter_id), name.name);
}

absl::StatusOr<nlohmann::json> DiskCheckpoints::ReadFields(
    const CheckpointName& name) const {
  return ReadDurableFields(AdapterDir(name.adapter_id), name.name);
}

absl::Status DiskCheckpoints::ReplaceFields(const CheckpointName& name,
                                            const nlohmann::json& fields) {
  return ReplaceDurableFields(AdapterDir(name.adapter_id), name.name, fields);
}

absl::Status DiskCheckpoints::Remove(const CheckpointName& name) {
  WEFT_RETURN_IF_ERROR(
      RemoveDurableFolder(AdapterDir(name.adapter_id), name.name));
  RemoveIfEmpty(name.adapter_id);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ListedCheckpoint>> DiskCheckpoints::List(
    const std::string& adapter_id, bool is_prefix) const {
  const std::vector<std::string> adapters =
      is_prefix ? AdapterNames(adapter_id) : std::vector{adapter_id};
  std::vector<ListedCheckpoint> found;
  for (const std::string& adapter : adapters) {
    const absl::StatusOr<std::vector<ListedFolder>> folders =
        ListDurableFolders(AdapterDir(adapter));
    if (!folders.ok()) {
      Log(LogLevel::kWarning, "unreadable folder of checkpoints",
          {{"adapter", adapter}, {"reason", folders.status().message()}});
      continue;
    }
    for (const ListedFolder& folder : *folders) {
      found.push_back({.name = {.adapter_id = adapter, .name = folder.name},
                       .version = folder.version});
    }
  }
  return found;
}

std::string DiskCheckpoints::AdapterDir(const std::string& adapter_id) const {
  return absl::StrCat(folder_, "/", adapter_id);
}

std::vector<std::string> DiskCheckpoints::AdapterNames(
    const std::string& prefix) const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder_, error), end;
       !error && it != end; it.increment(error)) {
    std::error_code ignored;
    std::string name = it->path().filename().string();
    // Skips folders of the daemon's own files, whose names begin with a dot.
    // Adapter ids do not begin with a dot.
    if (name.front() != '.' && name.starts_with(prefix) &&
        !it->is_symlink(ignored) && it->is_directory(ignored)) {
      names.push_back(std::move(name));
    }
  }
  return names;
}

void DiskCheckpoints::RemoveIfEmpty(const std::string& adapter_id) const {
  // Fails, as it should, if the folder has checkpoints or is a link.
  (void)::rmdir(AdapterDir(adapter_id).c_str());
}

}  // namespace weft::checkpoint
