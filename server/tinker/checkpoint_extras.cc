#include "server/tinker/checkpoint_extras.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/field_checks.h"
#include "server/tinker/audit.h"
#include "server/tinker/runs.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// Returns the key of a checkpoint in Front::extras. The key contains the owner,
// because two tenants may use the same name for a run.
std::string KeyOf(const Caller& caller, const CheckpointPath& path) {
  return absl::StrCat(OwnerKey(caller), " ", path.ToString());
}

void Drop(Front& front, const std::string& key) {
  front.extras.erase(key);
  front.ledger.Erase(EntryKind::kCheckpoint, key);
}

}  // namespace

absl::StatusOr<CheckpointExtras> ReadExtras(const Json& body) {
  CheckpointExtras extras;
  WEFT_ASSIGN_OR_RETURN(extras.user_metadata,
                        ShownField(body, "user_metadata"));
  if (Find(body, "ttl_seconds") == nullptr) return extras;
  WEFT_ASSIGN_OR_RETURN(const int64_t ttl, IntField(body, "ttl_seconds"));
  if (ttl < kMinTtlSeconds || ttl > kMaxTtlSeconds) {
    return BadField("ttl_seconds",
                    absl::StrCat("is ", ttl, ", must be in [", kMinTtlSeconds,
                                 ", ", kMaxTtlSeconds, "]"));
  }
  extras.expires_at =
      absl::FromUnixSeconds(absl::ToUnixSeconds(absl::Now()) + ttl);
  return extras;
}

void KeepExtras(Front& front, const Caller& caller, const CheckpointPath& path,
                const CheckpointExtras& extras) {
  const std::string key = KeyOf(caller, path);
  if (extras.user_metadata.empty() && !extras.expires_at &&
      extras.base_model.empty() && extras.copied_from.empty()) {
    return Drop(front, key);
  }
  Json fields = {{"caller", CallerToJson(caller)},
                 {"path", path.ToString()},
                 {"user_metadata", Shown(extras.user_metadata)},
                 {"base_model", extras.base_model}};
  if (!extras.copied_from.empty()) fields["copied_from"] = extras.copied_from;
  if (extras.expires_at) {
    fields["expires_at"] = absl::ToUnixSeconds(*extras.expires_at);
  }
  front.ledger.Put(EntryKind::kCheckpoint,
                   {.id = key, .fields = fields, .bytes = ""},
                   [](const absl::Status& kept) {
                     if (kept.ok()) return;
                     Log(LogLevel::kError,
                         "a checkpoint's metadata will not outlive the server",
                         {{"error", std::string(kept.message())}});
                   });
  fields["user_metadata"] = extras.user_metadata;
  front.extras[key] = {.fields = std::move(fields), .charge = extras.charge};
}

CheckpointExtras FindExtras(const Front& front, const Caller& caller,
                            const CheckpointPath& path) {
  const auto found = front.extras.find(KeyOf(caller, path));
  if (found == front.extras.end()) return {};
  const Json& fields = found->second.fields;
  CheckpointExtras extras{.user_metadata = fields.value("user_metadata", ""),
                          .base_model = fields.value("base_model", ""),
                          .copied_from = fields.value("copied_from", ""),
                          .charge = found->second.charge};
  if (fields.contains("expires_at")) {
    extras.expires_at =
        absl::FromUnixSeconds(fields["expires_at"].get<int64_t>());
  }
  return extras;
}

std::string BaseModelOf(const Front& front, const Caller& caller,
                        const CheckpointPath& path) {
  const std::string name = FindExtras(front, caller, path).base_model;
  return name.empty() ? front.model_name() : name;
}

void SweepCheckpoints(Front& front, absl::Time now) {
  std::vector<Json> over;
  for (const auto& [key, kept] : front.extras) {
    const Json& fields = kept.fields;
    if (fields.contains("expires_at") &&
        fields["expires_at"].get<int64_t>() <= absl::ToUnixSeconds(now)) {
      over.push_back(fields);
    }
  }
  for (const Json& fields : over) {
    const auto path = ParseCheckpointPath(fields.value("path", ""));
    const Caller caller = CallerFromJson(fields.value("caller", Json()));
    if (!path.ok()) continue;
    const auto end = [&front, key = KeyOf(caller, *path), caller, path,
                      fields](const absl::Status& deleted) {
      if (!deleted.ok() && !absl::IsNotFound(deleted)) return;
      if (deleted.ok()) NoteEvent(front, caller, "delete", *path, "expired");
      const auto found = front.extras.find(key);
      // A new checkpoint of this name may have other extras by now.
      if (found != front.extras.end() && found->second.fields == fields) {
        Drop(front, key);
      }
    };
    const absl::Status refused = DeleteRunCheckpoint(
        front, {.caller = caller}, *path,
        [end](const absl::StatusOr<bool>& deleted) { end(deleted.status()); });
    if (!refused.ok()) end(refused);
  }
}

void RestoreExtras(Front& front) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kCheckpoint)) {
    const Caller caller = CallerFromJson(entry.fields.value("caller", Json()));
    std::string metadata =
        ShownField(entry.fields, "user_metadata").value_or("");
    auto charge = front.ChargeEntry(OwnerKey(caller), metadata.size());
    entry.fields["user_metadata"] = std::move(metadata);
    front.extras[entry.id] = {.fields = std::move(entry.fields),
                              .charge = std::move(charge).value_or(nullptr)};
  }
}

}  // namespace weft::tinker
