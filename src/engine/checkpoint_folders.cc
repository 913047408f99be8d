// Lists checkpoints. Deletes expired checkpoints, and the oldest ones above a
// maximum number.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/base/durable_folder.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/base/tokens.h"
#include "src/engine/adapter_io.h"

namespace weft::engine {
namespace {

using nlohmann::json;

// The pause after a failed deletion of an expired checkpoint.
constexpr absl::Duration kExpiryRetry = absl::Minutes(1);

}  // namespace

std::string AdapterIo::AdapterDir(const std::string& adapter_id) const {
  return absl::StrCat(checkpoint_dir_, "/", adapter_id);
}

std::vector<std::string> AdapterIo::AdapterNames(
    const std::string& prefix) const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(checkpoint_dir_, error), end;
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

void AdapterIo::RemoveStaleFiles() const {
  for (const std::string& adapter : AdapterNames("")) {
    if (const absl::Status status = RemoveStaleTemporaries(AdapterDir(adapter));
        !status.ok()) {
      Log(LogLevel::kWarning, "stale files stay",
          {{"reason", status.message()}});
    }
  }
}

bool AdapterIo::IsExpired(const std::string& adapter_id,
                          const std::string& name) const {
  const absl::StatusOr<json> fields =
      ReadDurableFields(AdapterDir(adapter_id), name);
  if (!fields.ok()) return false;
  const absl::StatusOr<CheckpointInfo> info =
      lora::ReadCheckpointFields(*fields);
  return info.ok() && info->expires_at <= absl::Now();
}

std::vector<CheckpointInfo> AdapterIo::ListAll(
    const std::string& adapter_id) const {
  const std::vector<std::string> adapters =
      NamesAll(adapter_id) ? AdapterNames(adapter_id) : std::vector{adapter_id};
  std::vector<CheckpointInfo> infos;
  for (const std::string& adapter : adapters) {
    const absl::StatusOr<std::vector<std::string>> names =
        ListDurableFolders(AdapterDir(adapter));
    if (!names.ok()) {
      Log(LogLevel::kWarning, "unreadable folder of checkpoints",
          {{"adapter", adapter}, {"reason", names.status().message()}});
      continue;
    }
    for (const std::string& name : *names) {
      const absl::StatusOr<json> fields =
          ReadDurableFields(AdapterDir(adapter), name);
      absl::StatusOr<CheckpointInfo> info =
          fields.ok() ? lora::ReadCheckpointFields(*fields) : fields.status();
      if (info.ok()) {
        // Takes adapter_id and name from the path, because somebody may have
        // moved the folder.
        info->adapter_id = adapter;
        info->name = name;
        infos.push_back(*std::move(info));
      } else {
        Log(LogLevel::kWarning, "damaged checkpoint",
            {{"adapter", adapter}, {"name", name}});
      }
    }
  }
  std::ranges::sort(infos, std::greater<>(), &CheckpointInfo::created_at);
  return infos;
}

absl::StatusOr<std::vector<CheckpointInfo>> AdapterIo::List(
    const std::string& adapter_id) const {
  std::vector<CheckpointInfo> infos = ListAll(adapter_id);
  std::erase_if(infos, [now = absl::Now()](const CheckpointInfo& info) {
    return info.expires_at <= now;
  });
  return infos;
}

absl::Time AdapterIo::NextCreation(const std::string& adapter_id) {
  DeleteExpired();  // The first call reads the checkpoints that exist.
  absl::Time next = absl::Now();
  for (auto it = stored_.lower_bound({adapter_id, ""});
       it != stored_.end() && it->first.first == adapter_id; ++it) {
    next = std::max(next, it->second.created_at + absl::Microseconds(1));
  }
  return next;
}

void AdapterIo::DeleteExpired() {
  const absl::Time now = absl::Now();
  if (now < next_expiry_) return;
  next_expiry_ = absl::InfiniteFuture();
  stored_.clear();
  for (const CheckpointInfo& info : ListAll("")) {
    stored_[{info.adapter_id, info.name}] = {.bytes = info.size_bytes,
                                             .created_at = info.created_at};
    if (info.expires_at > now) {
      next_expiry_ = std::min(next_expiry_, info.expires_at);
      continue;
    }
    const absl::Status deleted = Delete(info.adapter_id, info.name);
    if (!deleted.ok())
      next_expiry_ = std::min(next_expiry_, now + kExpiryRetry);
    Log(deleted.ok() ? LogLevel::kInfo : LogLevel::kWarning,
        deleted.ok() ? "expired checkpoint deleted"
                     : "an expired checkpoint stays",
        {{"adapter", info.adapter_id},
         {"name", info.name},
         {"reason", deleted.message()}});
  }
}

absl::Status AdapterIo::Delete(const std::string& adapter_id,
                               const std::string& name) {
  WEFT_RETURN_IF_ERROR(RemoveDurableFolder(AdapterDir(adapter_id), name));
  stored_.erase({adapter_id, name});
  RemoveIfEmpty(adapter_id);
  return absl::OkStatus();
}

void AdapterIo::RemoveIfEmpty(const std::string& adapter_id) const {
  // Fails, as it should, if the folder has checkpoints or is a link.
  (void)::rmdir(AdapterDir(adapter_id).c_str());
}

uint64_t AdapterIo::stored_bytes() const {
  uint64_t bytes = 0;
  for (const auto& [checkpoint, stored] : stored_) bytes += stored.bytes;
  return bytes;
}

void AdapterIo::KeepNewest(const CheckpointInfo& saved, uint64_t count) {
  uint64_t kept = 1;  // Counts `saved`.
  for (const CheckpointInfo& other : ListAll(saved.adapter_id)) {
    if (other.kind != saved.kind || other.name == saved.name) continue;
    if (++kept <= count) continue;
    if (const absl::Status deleted = Delete(saved.adapter_id, other.name);
        !deleted.ok()) {
      Log(LogLevel::kWarning, "an old checkpoint stays",
          {{"adapter", saved.adapter_id},
           {"name", other.name},
           {"reason", deleted.message()}});
    }
  }
}

absl::Status AdapterIo::NameOthers(const absl::Status& status,
                                   const std::string& adapter_id) const {
  constexpr size_t kMaxNames = 5;
  if (!absl::IsNotFound(status)) return status;
  const absl::StatusOr<std::vector<CheckpointInfo>> others = List(adapter_id);
  if (!others.ok() || others->empty()) return status;
  std::vector<std::string> names;
  for (const CheckpointInfo& info : *others) names.push_back(info.name);
  std::ranges::sort(names);
  const size_t more = names.size() - std::min(names.size(), kMaxNames);
  names.resize(names.size() - more);
  absl::Status named = absl::NotFoundError(
      absl::StrCat(status.message(), "; there are checkpoints '",
                   absl::StrJoin(names, "', '"), "'",
                   more > 0 ? absl::StrCat(" and ", more, " more") : ""));
  status.ForEachPayload(
      [&named](absl::string_view url, const absl::Cord& data) {
        named.SetPayload(url, data);
      });
  return named;
}

}  // namespace weft::engine
