#include "src/directory/directory.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"
#include "src/request/move_unit.h"

namespace weft::directory {
namespace {

constexpr char kEntries[] = "adapters/";
constexpr char kShared[] = "shared/";
constexpr uint64_t kMaxEntryBytes = 4096;
constexpr char kLog[] = "log";
constexpr char kBorn[] = "born";

std::string KeyOf(const std::string& adapter_id) {
  return absl::StrCat(kEntries, UnitOf(adapter_id));
}

}  // namespace

Directory::Directory(store::ObjectStore* store, Logs logs)
    : store_(*store),
      logs_(std::move(logs)),
      arrivals_(store, logs_.own, logs_.answers),
      memory_(std::make_unique<OwnerMemory>(
          [this](int log) -> absl::StatusOr<std::string> {
            if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
            const absl::StatusOr<OwnerAddress> owner = logs_.owner(log);
            WEFT_RETURN_IF_ERROR(AsAnswer(owner.status()));
            return owner->value_or("");
          },
          [this](const std::string& adapter_id) {
            Find(adapter_id).IgnoreError();
          })) {}

absl::StatusOr<Directory::Entry> Directory::Read(
    const std::string& adapter_id) const {
  if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
  absl::StatusOr<store::Object> object =
      store_.Get(KeyOf(adapter_id), kMaxEntryBytes);
  WEFT_RETURN_IF_ERROR(AsAnswer(object.status()));
  Entry entry = {.etag = std::move(object->etag),
                 .bytes = std::move(object->bytes)};
  const nlohmann::json fields =
      nlohmann::json::parse(entry.bytes, nullptr, /*allow_exceptions=*/false);
  if (fields.is_object() && fields.contains(kLog) &&
      fields[kLog].is_number_unsigned()) {
    entry.log = fields[kLog].get<int>();
  }
  if (fields.is_object() && fields.contains(kBorn) &&
      fields[kBorn].is_string()) {
    entry.born = fields[kBorn].get<std::string>();
  }
  return entry;
}

absl::Status Directory::CheckOwn(const std::string& adapter_id,
                                 const Entry& entry) const {
  if (!entry.log) {
    return absl::DataLossError(
        absl::StrCat(store_.NameOf(KeyOf(adapter_id)), " is damaged"));
  }
  if (*entry.log == logs_.own) return absl::OkStatus();
  const absl::StatusOr<OwnerAddress> owner = logs_.owner(*entry.log);
  WEFT_RETURN_IF_ERROR(AsAnswer(owner.status()));
  memory_->Note(UnitOf(adapter_id), *entry.log, owner->value_or(""));
  return MovedTo(owner->value_or(""), adapter_id);
}

absl::Status Directory::Find(const std::string& adapter_id) const {
  const absl::StatusOr<Entry> entry = Read(adapter_id);
  if (entry.ok()) WEFT_RETURN_IF_ERROR(CheckOwn(adapter_id, *entry));
  if (!entry.ok() && !absl::IsNotFound(entry.status())) return entry.status();
  memory_->Forget(UnitOf(adapter_id));
  return AsAnswer(logs_.confirm_own());
}

std::string Directory::NewEntry(const std::string& born) {
  const uint64_t claim = num_claims_++;
  return nlohmann::json(
             {{kLog, logs_.own},
              {"epoch", logs_.epoch},
              {"claim", claim},
              {kBorn, born.empty() ? absl::StrCat(logs_.own, "-", logs_.epoch,
                                                  "-", claim)
                                   : born}})
      .dump();
}

absl::StatusOr<bool> Directory::Take(const std::string& adapter_id,
                                     const std::string& version) {
  if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
  const size_t at = version.find('@');
  const std::string etag = version.substr(at + 1);
  const absl::Status swapped =
      store_.Swap(KeyOf(adapter_id), NewEntry(version.substr(0, at)), etag)
          .status();
  if (swapped.ok()) return true;
  if (!absl::IsAborted(swapped)) return AsAnswer(swapped);
  const absl::StatusOr<Entry> entry = Read(adapter_id);
  if (absl::IsNotFound(entry.status())) return false;
  WEFT_RETURN_IF_ERROR(entry.status());
  // A store may have refused it for a while.
  if (entry->etag == etag) return AsAnswer(swapped);
  return entry->log == logs_.own && entry->IsOf(version);
}

absl::Status Directory::CheckOwned(int log) const {
  if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
  const absl::StatusOr<OwnerAddress> owner = logs_.owner(log);
  WEFT_RETURN_IF_ERROR(AsAnswer(owner.status()));
  if (!owner->value_or("").empty()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("log ", log, " has no server now: try again"));
}

absl::Status Directory::Write(const std::string& adapter_id) {
  if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
  const std::string key = KeyOf(adapter_id);
  std::string bytes = NewEntry(/*born=*/"");
  absl::Status written = store_.Create(key, {bytes}).status();
  if (!absl::IsAlreadyExists(written)) return AsAnswer(written);
  const absl::StatusOr<Entry> entry = Read(adapter_id);
  // Deleted just now, so the call may come again.
  if (absl::IsNotFound(entry.status())) return absl::UnavailableError(key);
  WEFT_RETURN_IF_ERROR(entry.status());
  if (entry->bytes == bytes) return absl::OkStatus();  // An answer was lost.
  if (entry->log) WEFT_RETURN_IF_ERROR(CheckOwn(adapter_id, *entry));
  // It may be the entry of an adapter on its way, whose logs have to see whose
  // the adapter is.
  bytes = NewEntry(entry->born);
  written = store_.Swap(key, bytes, entry->etag).status();
  if (!absl::IsAborted(written)) return AsAnswer(written);
  const absl::StatusOr<Entry> now = Read(adapter_id);
  return now.ok() && now->bytes == bytes ? absl::OkStatus()
                                         : absl::UnavailableError(key);
}

absl::Status Directory::Claim(const std::string& adapter_id) {
  WEFT_RETURN_IF_ERROR(Write(adapter_id));
  MutexLock lock(&mu_);
  ++claims_[UnitOf(adapter_id)];
  return absl::OkStatus();
}

void Directory::EndClaim(const std::string& adapter_id) {
  MutexLock lock(&mu_);
  const auto claim = claims_.find(UnitOf(adapter_id));
  if (--claim->second == 0) claims_.erase(claim);
}

absl::Status Directory::Free(const std::string& adapter_id,
                             const std::function<bool()>& exists) {
  {
    // A claim that has ended has made its adapter, or will be freed by another
    // call. No claim begins during this one.
    MutexLock lock(&mu_);
    if (claims_.contains(UnitOf(adapter_id))) return absl::OkStatus();
  }
  if (exists()) return absl::OkStatus();
  const absl::StatusOr<Entry> entry = Read(adapter_id);
  if (absl::IsNotFound(entry.status())) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(entry.status());
  if (entry->log != logs_.own) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(AsAnswer(logs_.confirm_own()));
  // Without the condition a deletion that arrives late, perhaps when another
  // process has this log, would remove the entry of a new adapter.
  const absl::Status deleted = store_.DeleteIf(KeyOf(adapter_id), entry->etag);
  return absl::IsAborted(deleted) ? absl::OkStatus() : AsAnswer(deleted);
}

absl::Status Directory::Restore(const std::set<std::string>& adapter_ids) {
  const absl::StatusOr<std::vector<store::ListedObject>> entries =
      store_.List(kEntries, "", store::kAllObjects);
  WEFT_RETURN_IF_ERROR(AsAnswer(entries.status()));
  std::set<std::string> named;
  for (const store::ListedObject& entry : *entries) named.insert(entry.key);
  for (const std::string& adapter_id : adapter_ids) {
    if (!named.insert(KeyOf(adapter_id)).second) continue;
    const absl::Status claimed = Claim(adapter_id);
    if (!claimed.ok()) {
      if (!FindReason(claimed)) return claimed;
      Log(LogLevel::kError, "another log has an adapter with the same name",
          {{"adapter", adapter_id}, {"reason", claimed.message()}});
      continue;
    }
    EndClaim(adapter_id);
  }
  return absl::OkStatus();
}

void Directory::FindOwner(
    const std::string& unit, int home,
    std::function<void(const absl::StatusOr<std::string>&)> done) {
  // No name has a space.
  memory_->FindOwner(
      unit.empty() ? absl::StrCat("log ", home) : unit,
      [this, unit, home]() -> absl::StatusOr<int> {
        const absl::StatusOr<Entry> entry =
            unit.empty() ? absl::NotFoundError("") : Read(unit);
        if (!entry.ok() && !absl::IsNotFound(entry.status())) {
          return entry.status();
        }
        const int log = entry.ok() ? entry->log.value_or(home) : home;
        if (log == logs_.own || log < 0 || log >= logs_.count) {
          return absl::NotFoundError(
              absl::StrCat("no other log has '", unit, "'"));
        }
        return log;
      },
      std::move(done));
}

absl::Status Directory::SendElsewhere(const std::string& adapter_id) const {
  WEFT_RETURN_IF_ERROR(Find(adapter_id));
  WEFT_ASSIGN_OR_RETURN(const std::vector<int> logs, OtherLogs());
  if (logs.empty()) return absl::UnavailableError("no other log has a server");
  WEFT_ASSIGN_OR_RETURN(const OwnerAddress owner, logs_.owner(logs.front()));
  return MovedTo(owner.value_or(""), adapter_id);
}

absl::StatusOr<std::vector<int>> Directory::OtherLogs() const {
  if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
  const std::vector<absl::StatusOr<OwnerAddress>> owners = logs_.owners();
  std::vector<int> logs;
  for (int log = 0; log < static_cast<int>(owners.size()); ++log) {
    WEFT_RETURN_IF_ERROR(AsAnswer(owners[log].status()));
    if (log != logs_.own && !owners[log]->value_or("").empty()) {
      logs.push_back(log);
    }
  }
  return logs;
}

absl::StatusOr<std::vector<std::string>> Directory::OtherOwners() const {
  if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
  const std::vector<absl::StatusOr<OwnerAddress>> owners = logs_.owners();
  std::vector<std::string> addresses;
  for (size_t log = 0; log < owners.size(); ++log) {
    if (static_cast<int>(log) == logs_.own) continue;
    WEFT_RETURN_IF_ERROR(AsAnswer(owners[log].status()));
    const OwnerAddress& owner = *owners[log];
    if (!owner) continue;
    if (owner->empty()) {
      return absl::UnavailableError(
          absl::StrCat("log ", log,
                       " has no server now, so its adapters are not known: "
                       "try again"));
    }
    addresses.push_back(*owner);
  }
  return addresses;
}

absl::StatusOr<std::string> Directory::Agree(const std::string& name,
                                             const std::string& bytes) {
  if (!logs_.answers()) return absl::UnavailableError(kStoreAway);
  const std::string key = absl::StrCat(kShared, name);
  const absl::Status made = store_.Create(key, {bytes}).status();
  if (!absl::IsAlreadyExists(made)) {
    WEFT_RETURN_IF_ERROR(AsAnswer(made));
    return bytes;
  }
  absl::StatusOr<store::Object> there = store_.Get(key, kMaxEntryBytes);
  WEFT_RETURN_IF_ERROR(AsAnswer(there.status()));
  return std::move(there->bytes);
}

}  // namespace weft::directory
