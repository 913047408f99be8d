#include "server/tinker/checkpoints.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "server/field_checks.h"
#include "server/tinker/accounts.h"
#include "server/tinker/runs.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

constexpr absl::string_view kScheme = "tinker://";

struct KindNames {
  CheckpointKind kind;
  absl::string_view segment;
  const char* type;
  const char* saved_by;
};
constexpr KindNames kKinds[] = {
    {CheckpointKind::kTraining, "weights", "training", "save_weights"},
    {CheckpointKind::kSampler, "sampler_weights", "sampler",
     "save_weights_for_sampler"},
    {CheckpointKind::kExternal, "external_weights", "external",
     "save_weights_external"}};

const KindNames& NamesOf(CheckpointKind kind) {
  return kKinds[static_cast<size_t>(kind)];
}

absl::Status BadPath(absl::string_view path) {
  return BadField("path", absl::StrCat("is ", Quoted(path),
                                       ", must be "
                                       "tinker://RUN/KIND/NAME, KIND being "
                                       "weights, sampler_weights or "
                                       "external_weights"));
}

}  // namespace

std::string CheckpointPath::Id() const {
  return absl::StrCat(NamesOf(kind).segment, "/", name);
}

std::string CheckpointPath::ToString() const {
  return absl::StrCat(kScheme, run, "/", Id());
}

std::string CheckpointPath::WeftName() const {
  if (kind == CheckpointKind::kTraining) return name;
  return absl::StrCat(NamesOf(kind).segment, ".", name);
}

const char* CheckpointPath::KindName() const { return NamesOf(kind).type; }

const char* CheckpointPath::SavedBy() const { return NamesOf(kind).saved_by; }

CheckpointPath PathOfWeft(absl::string_view run, absl::string_view weft_name) {
  CheckpointPath path{.run = std::string(run), .name = std::string(weft_name)};
  for (const KindNames& names : kKinds) {
    const std::string prefix = absl::StrCat(names.segment, ".");
    if (names.kind == CheckpointKind::kTraining ||
        !absl::StartsWith(weft_name, prefix)) {
      continue;
    }
    path.kind = names.kind;
    path.name = std::string(weft_name.substr(prefix.size()));
  }
  return path;
}

absl::StatusOr<CheckpointPath> NameCheckpoint(absl::string_view field,
                                              absl::string_view run,
                                              CheckpointKind kind,
                                              absl::string_view name) {
  WEFT_RETURN_IF_ERROR(CheckName(field, name));
  CheckpointPath path{
      .run = std::string(run), .kind = kind, .name = std::string(name)};
  WEFT_RETURN_IF_ERROR(CheckName(field, path.WeftName()));
  if (PathOfWeft(run, path.WeftName()).kind == kind) return path;
  return BadField(field, absl::StrCat("has the name ", Quoted(name),
                                      ", which begins as another kind's"));
}

absl::StatusOr<CheckpointPath> ParseCheckpointId(absl::string_view run,
                                                 absl::string_view id) {
  const std::vector<absl::string_view> parts = absl::StrSplit(id, '/');
  if (parts.size() != 2) return BadPath(id);
  for (const KindNames& names : kKinds) {
    if (parts[0] != names.segment) continue;
    return NameCheckpoint("path", run, names.kind, parts[1]);
  }
  return BadPath(id);
}

absl::StatusOr<CheckpointPath> ParseCheckpointPath(
    const absl::StatusOr<std::string>& path) {
  WEFT_RETURN_IF_ERROR(path.status());
  absl::string_view rest = *path;
  if (!absl::ConsumePrefix(&rest, kScheme)) return BadPath(*path);
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(rest, absl::MaxSplits('/', 1));
  if (parts.first.empty()) return BadPath(*path);
  return ParseCheckpointId(parts.first, parts.second);
}

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
  WEFT_ASSIGN_OR_RETURN(const int64_t ttl, Int(body, "ttl_seconds"));
  if (ttl < kMinTtlSeconds || ttl > kMaxTtlSeconds) {
    return BadField("ttl_seconds",
                    absl::StrCat("is ", ttl, ", must be in [", kMinTtlSeconds,
                                 ", ", kMaxTtlSeconds, "]"));
  }
  extras.expires_at =
      absl::FromUnixSeconds(absl::ToUnixSeconds(absl::Now()) + ttl);
  return extras;
}

absl::Status ChargeExtras(const Front& front, const Caller& caller,
                          CheckpointExtras* extras) {
  WEFT_ASSIGN_OR_RETURN(
      extras->charge,
      front.ChargeEntry(OwnerKey(caller), extras->user_metadata.size() +
                                              extras->base_model.size() +
                                              extras->copied_from.size()));
  return absl::OkStatus();
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
                 {"base_model", extras.base_model},
                 {"copied_from", extras.copied_from}};
  if (extras.expires_at) {
    fields["expires_at"] = absl::ToUnixSeconds(*extras.expires_at);
  }
  front.ledger.Put(EntryKind::kCheckpoint,
                   {.id = key, .fields = std::move(fields)},
                   [](const absl::Status& kept) {
                     if (kept.ok()) return;
                     Log(LogLevel::kError,
                         "a checkpoint's metadata will not outlive the server",
                         {{"error", std::string(kept.message())}});
                   });
  front.extras[key] = {
      .caller = caller, .path = path.ToString(), .extras = extras};
}

CheckpointExtras FindExtras(const Front& front, const Caller& caller,
                            const CheckpointPath& path) {
  const auto found = front.extras.find(KeyOf(caller, path));
  return found == front.extras.end() ? CheckpointExtras()
                                     : found->second.extras;
}

std::string BaseModelOf(const Front& front, const Caller& caller,
                        const CheckpointPath& path) {
  const std::string name = FindExtras(front, caller, path).base_model;
  return name.empty() ? front.model_name() : name;
}

void SweepCheckpoints(Front& front, absl::Time now) {
  const auto is_over = [now](const KeptExtras& kept) {
    return kept.extras.expires_at && *kept.extras.expires_at <= now;
  };
  for (const std::string& key : IdsWhere(front.extras, is_over)) {
    const KeptExtras over = front.extras.at(key);
    const auto path = ParseCheckpointPath(over.path);
    if (!path.ok()) continue;
    const auto end = [&front, key, over, path](const absl::Status& deleted) {
      if (!deleted.ok() && !absl::IsNotFound(deleted)) return;
      if (deleted.ok()) {
        NoteEvent(front, over.caller, "delete", *path, "expired");
      }
      const auto found = front.extras.find(key);
      // A new checkpoint of this name may have other extras by now.
      if (found != front.extras.end() &&
          found->second.extras.charge == over.extras.charge &&
          found->second.extras.expires_at == over.extras.expires_at) {
        Drop(front, key);
      }
    };
    const absl::Status refused = DeleteRunCheckpoint(
        front, {.caller = over.caller}, *path,
        [end](const absl::StatusOr<bool>& deleted) { end(deleted.status()); });
    if (!refused.ok()) end(refused);
  }
}

void RestoreExtras(Front& front) {
  for (const LedgerEntry& entry :
       front.ledger.ReadAll(EntryKind::kCheckpoint)) {
    const Json& fields = entry.fields;
    KeptExtras& kept = front.extras[entry.id];
    kept.caller = CallerFromJson(fields.value("caller", Json()));
    kept.path = fields.value("path", "");
    CheckpointExtras& extras = kept.extras;
    extras.user_metadata = ShownField(fields, "user_metadata").value_or("");
    extras.base_model = fields.value("base_model", "");
    extras.copied_from = fields.value("copied_from", "");
    if (const Json* const seconds = Find(fields, "expires_at")) {
      extras.expires_at = absl::FromUnixSeconds(seconds->get<int64_t>());
    }
    extras.charge =
        front.ChargeIfRoom(OwnerKey(kept.caller), extras.user_metadata.size());
  }
}

}  // namespace weft::tinker
