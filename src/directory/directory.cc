#include "src/directory/directory.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::directory {
namespace {

constexpr char kEntries[] = "adapters/";
constexpr uint64_t kMaxEntryBytes = 4096;
constexpr char kLog[] = "log";

std::string KeyOf(const std::string& adapter_id) {
  return absl::StrCat(kEntries, adapter_id);
}

// A call repeats after UNAVAILABLE, which these errors are not.
absl::Status AsAnswer(const absl::Status& status) {
  if (absl::IsAborted(status)) return absl::UnavailableError(status.message());
  if (!store::IsAway(status)) return status;
  return absl::UnavailableError(absl::StrCat(
      "the store of the adapters' names does not answer: ", status.message()));
}

}  // namespace

absl::StatusOr<int> Directory::LogOf(const std::string& adapter_id) const {
  const std::string key = KeyOf(adapter_id);
  const absl::StatusOr<store::Object> entry = store_.Get(key, kMaxEntryBytes);
  WEFT_RETURN_IF_ERROR(AsAnswer(entry.status()));
  const nlohmann::json fields =
      nlohmann::json::parse(entry->bytes, nullptr, /*allow_exceptions=*/false);
  if (!fields.is_object() || !fields.contains(kLog) ||
      !fields[kLog].is_number_unsigned()) {
    return absl::DataLossError(absl::StrCat(store_.NameOf(key), " is damaged"));
  }
  return fields[kLog].get<int>();
}

absl::Status Directory::CheckOwn(const std::string& adapter_id) const {
  WEFT_ASSIGN_OR_RETURN(const int log, LogOf(adapter_id));
  if (log == logs_.own) return absl::OkStatus();
  const absl::StatusOr<std::optional<std::string>> owner = logs_.owner(log);
  WEFT_RETURN_IF_ERROR(AsAnswer(owner.status()));
  return MovedTo(owner->value_or(""), adapter_id);
}

absl::Status Directory::Find(const std::string& adapter_id) const {
  const absl::Status own = CheckOwn(adapter_id);
  if (!own.ok() && !absl::IsNotFound(own)) return own;
  return AsAnswer(logs_.confirm_own());
}

absl::Status Directory::Claim(const std::string& adapter_id) {
  const std::string entry = nlohmann::json({{kLog, logs_.own}}).dump();
  absl::Status named = store_.Create(KeyOf(adapter_id), {entry}).status();
  if (absl::IsAlreadyExists(named)) named = CheckOwn(adapter_id);
  if (absl::IsNotFound(named)) {
    return absl::UnavailableError(
        absl::StrCat("adapter '", adapter_id, "' is just being deleted"));
  }
  WEFT_RETURN_IF_ERROR(AsAnswer(named));
  MutexLock lock(&mu_);
  ++claims_[adapter_id];
  return absl::OkStatus();
}

void Directory::EndClaim(const std::string& adapter_id) {
  MutexLock lock(&mu_);
  const auto claim = claims_.find(adapter_id);
  if (--claim->second == 0) claims_.erase(claim);
}

absl::Status Directory::Free(const std::string& adapter_id,
                             const std::function<bool()>& exists) {
  {
    // A claim that has ended has made its adapter, or will be freed by another
    // call. No claim begins during this one.
    MutexLock lock(&mu_);
    if (claims_.contains(adapter_id)) return absl::OkStatus();
  }
  if (exists()) return absl::OkStatus();
  const absl::StatusOr<int> log = LogOf(adapter_id);
  if (absl::IsNotFound(log.status())) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(log.status());
  if (*log != logs_.own) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(AsAnswer(logs_.confirm_own()));
  return AsAnswer(store_.Delete(KeyOf(adapter_id)));
}

absl::Status Directory::Restore(const std::vector<std::string>& adapter_ids) {
  const absl::StatusOr<std::vector<store::ListedObject>> entries =
      store_.List(kEntries, "", store::kAllObjects);
  WEFT_RETURN_IF_ERROR(AsAnswer(entries.status()));
  std::set<std::string> named;
  for (const store::ListedObject& entry : *entries) named.insert(entry.key);
  for (const std::string& adapter_id : adapter_ids) {
    if (named.contains(KeyOf(adapter_id))) continue;
    const absl::Status claimed = Claim(adapter_id);
    if (!claimed.ok()) {
      Log(LogLevel::kError, "another log has an adapter with the same name",
          {{"adapter", adapter_id}, {"reason", claimed.message()}});
      continue;
    }
    EndClaim(adapter_id);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> Directory::OtherOwners() const {
  std::vector<std::string> addresses;
  for (int log = 0; log < logs_.count; ++log) {
    if (log == logs_.own) continue;
    const absl::StatusOr<std::optional<std::string>> owner = logs_.owner(log);
    WEFT_RETURN_IF_ERROR(AsAnswer(owner.status()));
    if (!owner->has_value()) continue;
    if ((*owner)->empty()) {
      return absl::UnavailableError(
          absl::StrCat("log ", log,
                       " has no server now, so its adapters are not known: "
                       "try again"));
    }
    addresses.push_back(**owner);
  }
  return addresses;
}

}  // namespace weft::directory
