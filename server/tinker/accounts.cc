#include "server/tinker/accounts.h"

#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/fields.h"
#include "server/tinker/handlers.h"
#include "server/wire/field_checks.h"
#include "src/base/observe/log.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

// Returns a number for a token's id. The SDK's type has numbers, and Weft's ids
// are names.
int64_t KeyNumber(const std::string& token_id) {
  int64_t number = 0;
  for (const char byte : Sha256(token_id).substr(0, 6)) {
    number = number << 8 | static_cast<unsigned char>(byte);
  }
  return number;
}

// The names by which the SDK's whoami calls the caller and its tenant.
std::string UserOf(const Caller& caller) {
  return caller.token_id().empty() ? "anyone" : caller.token_id();
}
std::string OrganizationOf(const Caller& caller) {
  return caller.tenant().empty() ? "weft" : caller.tenant();
}

// Returns the signature of a header and claims, both in base64.
absl::StatusOr<std::string> SignJwt(absl::string_view signed_part) {
  return Sign(absl::StrCat("jwt ", signed_part));
}

absl::Status BadJwt() {
  return absl::UnauthenticatedError(
      "the JWT is not of this process, or has expired: exchange the API key "
      "again");
}

}  // namespace

absl::StatusOr<std::string> MakeJwt(const Caller& caller,
                                    const std::string& token_hash,
                                    absl::Time now) {
  const int64_t seconds = absl::ToUnixSeconds(now);
  const Json claims = {{"iss", "weft"},
                       {"sub", absl::StrCat("weft:token:", UserOf(caller))},
                       {"org_id", OrganizationOf(caller)},
                       {"email", ""},
                       {"iat", seconds},
                       {"exp", seconds + absl::ToInt64Seconds(kJwtLifetime)},
                       {"token", token_hash}};
  const std::string signed_part =
      absl::StrCat(absl::WebSafeBase64Escape(R"({"alg":"HS256","typ":"JWT"})"),
                   ".", absl::WebSafeBase64Escape(claims.dump()));
  WEFT_ASSIGN_OR_RETURN(const std::string signature, SignJwt(signed_part));
  return absl::StrCat(signed_part, ".", signature);
}

absl::StatusOr<std::string> ReadJwt(absl::string_view jwt, absl::Time now) {
  const std::vector<absl::string_view> parts = absl::StrSplit(jwt, '.');
  if (parts.size() != 3) return BadJwt();
  WEFT_ASSIGN_OR_RETURN(
      const std::string signature,
      SignJwt(jwt.substr(0, jwt.size() - parts[2].size() - 1)));
  std::string text;
  if (!IsSignature(parts[2], signature) ||
      !absl::WebSafeBase64Unescape(parts[1], &text)) {
    return BadJwt();
  }
  const Json claims = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!claims.is_object() ||
      claims.value("exp", int64_t{0}) <= absl::ToUnixSeconds(now)) {
    return BadJwt();
  }
  return claims.value("token", "");
}

absl::StatusOr<Json> GetAuthToken(Front& /*front*/, const Call& call) {
  // A JWT is good for no other JWT, so it cannot outlive its hour.
  if (!call.jwt.empty()) return Json{{"jwt", call.jwt}};
  WEFT_ASSIGN_OR_RETURN(const std::string jwt,
                        MakeJwt(call.caller, call.token_hash, absl::Now()));
  return Json{{"jwt", jwt}};
}

absl::StatusOr<Json> GetApiKey(Front& /*front*/, const Call& call) {
  const std::string user = UserOf(call.caller);
  return Json{{"key_id", KeyNumber(user)},
              {"name", user},
              {"note", ""},
              {"details",
               {{"org_details", {{"name", OrganizationOf(call.caller)}}},
                {"user_details", {{"email", ""}}}}}};
}

absl::StatusOr<std::string> NewId() {
  unsigned char bytes[16];
  if (RAND_bytes(bytes, sizeof(bytes)) != 1) {
    return absl::InternalError("no randomness for an id");
  }
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes), sizeof(bytes)));
}

bool IsSignature(absl::string_view given, const std::string& signature) {
  return given.size() == signature.size() &&
         CRYPTO_memcmp(given.data(), signature.data(), given.size()) == 0;
}

absl::StatusOr<std::string> Sign(const std::string& text) {
  using Secret = std::array<unsigned char, 32>;
  static const std::pair<Secret, int> secret = [] {
    std::pair<Secret, int> made;
    made.second = RAND_bytes(made.first.data(), made.first.size());
    return made;
  }();
  if (secret.second != 1) {
    return absl::InternalError("no randomness for signatures");
  }
  unsigned char digest[32];
  unsigned size = sizeof(digest);
  HMAC(EVP_sha256(), secret.first.data(), secret.first.size(),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest,
       &size);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), size));
}

namespace {

constexpr absl::Duration kMaxWindow = absl::Hours(14 * 24);
constexpr double kBytesPerGigabyte = 1e9;

// The names of the counts in the ledger.
constexpr std::pair<const char*, int64_t UsageCounts::*> kCounts[] = {
    {"train", &UsageCounts::train_tokens},
    {"prompt", &UsageCounts::prompt_tokens},
    {"cached", &UsageCounts::cached_tokens},
    {"sampled", &UsageCounts::sampled_tokens},
    {"checkpoints", &UsageCounts::checkpoints}};

void Add(UsageCounts& to, const UsageCounts& counts) {
  for (const auto& [name, count] : kCounts) to.*count += counts.*count;
}

int64_t HourOf(absl::Time time) { return absl::ToUnixSeconds(time) / 3600; }

std::string EntryId(const UsageKey& key) {
  return absl::StrCat(key.hour, " ", key.owner, " ", key.session);
}

// Returns the row, which is made and charged if there is none.
UsageRow& RowOf(Front& front, const UsageKey& key) {
  const auto [row, made] = front.usage.try_emplace(key);
  if (made) {
    row->second.charge = front.ChargeIfRoom(key.owner, key.session.size());
  }
  return row->second;
}

absl::StatusOr<int64_t> QueryHour(const Call& call, const char* name) {
  const auto found = call.query.find(name);
  absl::Time time;
  if (found == call.query.end() ||
      !absl::ParseTime(absl::RFC3339_full, found->second, &time, nullptr)) {
    return BadField(name, "must be a time in the form of RFC 3339");
  }
  if (time != absl::FromUnixSeconds(HourOf(time) * 3600)) {
    return BadField(name, absl::StrCat("is ", found->second,
                                       ", must be a whole hour of UTC"));
  }
  return HourOf(time);
}

// The part of a BillingUsageEvent that says what was used. `tokens` decides the
// order of the events of an hour.
struct Used {
  int64_t tokens = 0;
  Json info;
};

std::vector<Used> UsedOf(const UsageCounts& counts) {
  std::vector<Used> out;
  const auto add = [&out](int64_t tokens, Json info) {
    if (tokens == 0) return;
    info["token_count"] = tokens;
    out.push_back({.tokens = tokens, .info = std::move(info)});
  };
  add(counts.train_tokens, {{"type", "training"}});
  add(counts.prompt_tokens, {{"type", "sampling_prefill"}, {"cached", false}});
  add(counts.cached_tokens, {{"type", "sampling_prefill"}, {"cached", true}});
  add(counts.sampled_tokens, {{"type", "sampling_sample"}});
  if (counts.checkpoints > 0) {
    out.push_back(
        {.tokens = 0,
         .info = {{"type", "checkpoint"}, {"count", counts.checkpoints}}});
  }
  return out;
}

}  // namespace

void CountUsage(Front& front, const std::string& owner,
                const std::string& session, const UsageCounts& counts) {
  UsageKey key{.owner = owner, .hour = HourOf(absl::Now()), .session = session};
  if (!front.usage.contains(key)) {
    int64_t rows = 0;
    for (auto row = front.usage.lower_bound({.owner = owner});
         row != front.usage.end() && row->first.owner == owner; ++row) {
      ++rows;
    }
    if (rows >= kMaxUsageRows) key.session.clear();
  }
  UsageRow& row = RowOf(front, key);
  Add(row.counts, counts);
  row.changed = true;
}

void SweepUsage(Front& front, absl::Time now) {
  const int64_t oldest = HourOf(now - kUsageTime);
  for (auto row = front.usage.begin(); row != front.usage.end();) {
    const UsageKey& key = row->first;
    if (key.hour < oldest) {
      front.ledger.Erase(EntryKind::kUsage, EntryId(key));
      row = front.usage.erase(row);
      continue;
    }
    if (std::exchange(row->second.changed, false)) {
      Json fields = {
          {"owner", key.owner}, {"hour", key.hour}, {"session", key.session}};
      for (const auto& [name, count] : kCounts) {
        fields[name] = row->second.counts.*count;
      }
      front.ledger.Put(EntryKind::kUsage,
                       {.id = EntryId(key), .fields = std::move(fields)},
                       [&front, key](const absl::Status& put) {
                         const auto found = front.usage.find(key);
                         if (!put.ok() && found != front.usage.end()) {
                           found->second.changed = true;
                         }
                       });
    }
    ++row;
  }
}

void RestoreUsage(Front& front) {
  for (const LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kUsage)) {
    const Json& fields = entry.fields;
    UsageCounts& counts =
        RowOf(front, {.owner = fields.value("owner", ""),
                      .hour = fields.value("hour", int64_t{0}),
                      .session = fields.value("session", "")})
            .counts;
    for (const auto& [name, count] : kCounts) {
      counts.*count = fields.value(name, int64_t{0});
    }
  }
}

absl::StatusOr<Json> GetUsage(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const int64_t begin, QueryHour(call, "starting_on"));
  WEFT_ASSIGN_OR_RETURN(const int64_t end, QueryHour(call, "ending_before"));
  if (begin > HourOf(absl::Now())) {
    return BadField("starting_on", "must not be in the future");
  }
  if (end < begin || absl::Hours(end - begin) > kMaxWindow) {
    return BadField("ending_before",
                    "must be at most 14 days after starting_on");
  }
  using Event = std::tuple<int64_t, int64_t, Json>;  // The first two order it.
  std::vector<Event> events;
  Json sessions = Json::object();
  for (const auto& [key, row] : front.usage) {
    if (key.hour < begin || key.hour >= end) continue;
    if (!call.caller.sees_all() && key.owner != call.owner()) continue;
    for (Used& used : UsedOf(row.counts)) {
      Json event = {
          {"bucket_start", TimeText(absl::FromUnixSeconds(key.hour * 3600))},
          {"bucket_end",
           TimeText(absl::FromUnixSeconds((key.hour + 1) * 3600))},
          {"base_model", front.model_name()},
          {"event_info", std::move(used.info)}};
      if (!key.owner.empty()) event["user_id"] = key.owner;
      if (!key.session.empty()) {
        event["session_id"] = key.session;
        sessions[key.session] = Json::object();
      }
      events.emplace_back(key.hour, -used.tokens, std::move(event));
    }
  }
  std::ranges::stable_sort(events, {}, [](const Event& event) {
    return std::pair(std::get<0>(event), std::get<1>(event));
  });
  for (auto& [id, shown] : sessions.items()) {
    const auto session = front.sessions.find(id);
    if (session == front.sessions.end()) continue;
    ShowMetadata(session->second.user_metadata, &shown);
  }
  Json data = Json::array();
  for (Event& event : events) data.push_back(std::move(std::get<2>(event)));
  return Json{{"data", data}, {"sessions", sessions}};
}

absl::Status GetStorage(Front& front, const CallPtr& call,
                        const Respond& respond) {
  if (call->query.contains("project_id")) return NoProjects("project_id");
  return ListCheckpoints(
      front, call, "",
      ReplyWith(respond, [call, one = front.port.core()->authenticator ==
                                      nullptr](const Checkpoints& found) {
        std::map<std::string, std::pair<int64_t, int64_t>> by_tenant;
        for (const CheckpointInfo& info : found) {
          // Without tokens there are no tenants.
          auto& [count, bytes] =
              by_tenant[one ? OrganizationOf(call->caller) : info.tenant];
          ++count;
          bytes += static_cast<int64_t>(info.size_bytes);
        }
        Json data = Json::array();
        for (const auto& [tenant, sum] : by_tenant) {
          data.push_back({{"org_user_urn", tenant},
                          {"checkpoint_count", sum.first},
                          {"size_bytes", sum.second},
                          {"size_gigabytes", static_cast<double>(sum.second) /
                                                 kBytesPerGigabyte}});
        }
        return Json{{"data", data}};
      }));
}

namespace {

// Returns the ledger's id of an event.
std::string EventId(const std::string& owner, int64_t nanos) {
  return absl::StrCat(owner, " ", nanos);
}

// Returns the day [begin, end) that the query asks for.
absl::StatusOr<std::pair<int64_t, int64_t>> QueryDay(const Call& call) {
  const absl::TimeZone utc = absl::UTCTimeZone();
  absl::CivilDay day = absl::ToCivilDay(absl::Now(), utc);
  const auto found = call.query.find("day");
  // A year beyond four digits would overflow.
  if (found != call.query.end() &&
      (!absl::ParseCivilTime(found->second, &day) || day.year() > 9999 ||
       day.year() < 1)) {
    return BadField("day", "must be a date in the form 2026-01-31");
  }
  return std::pair(absl::ToUnixNanos(absl::FromCivil(day, utc)),
                   absl::ToUnixNanos(absl::FromCivil(day + 1, utc)));
}

}  // namespace

void NoteEvent(Front& front, const Caller& caller, const char* action,
               const CheckpointPath& path, const char* purpose) {
  const std::string owner = OwnerKey(caller);
  std::map<int64_t, KeptEvent>& events = front.events[owner];
  int64_t now = absl::ToUnixNanos(absl::Now());
  // Events of one moment need different keys.
  if (!events.empty()) now = std::max(now, events.rbegin()->first + 1);
  Json details = {{"actor", UserOf(caller)},
                  {"tinker_path", path.ToString()},
                  {"model_id", path.run}};
  if (*purpose != '\0') details["purpose"] = purpose;
  Json event = {{"event", absl::StrCat("checkpoint_", action)},
                {"event_details", std::move(details)}};
  front.ledger.Put(
      EntryKind::kEvent,
      {.id = EventId(owner, now),
       .fields = {{"owner", owner}, {"nanos", now}, {"event", event}}},
      [](const absl::Status& put) {
        if (put.ok()) return;
        Log(LogLevel::kError, "an audit event will not outlive the server",
            {{"error", std::string(put.message())}});
      });
  auto charge = front.ChargeIfRoom(owner, path.ToString().size());
  events[now] = {.event = std::move(event), .charge = std::move(charge)};
  if (events.size() <= kMaxEvents) return;
  front.ledger.Erase(EntryKind::kEvent, EventId(owner, events.begin()->first));
  events.erase(events.begin());
}

void RestoreEvents(Front& front) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kEvent)) {
    const std::string owner = entry.fields.value("owner", "");
    Json& event = entry.fields["event"];
    auto charge = front.ChargeIfRoom(owner, event.dump().size());
    front.events[owner][entry.fields.value("nanos", int64_t{0})] = {
        .event = std::move(event), .charge = std::move(charge)};
  }
}

absl::StatusOr<Json> GetAuditLog(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const auto day, QueryDay(call));
  const auto type = call.query.find("event_type");
  const bool wanted = type == call.query.end() || type->second == "all" ||
                      type->second == "checkpoints";
  std::vector<std::pair<int64_t, const Json*>> found;
  for (const auto& [owner, events] : front.events) {
    if (!wanted) break;
    if (!call.caller.sees_all() && owner != call.owner()) continue;
    for (auto event = events.lower_bound(day.first);
         event != events.end() && event->first < day.second; ++event) {
      found.emplace_back(event->first, &event->second.event);
    }
  }
  std::ranges::sort(found, {}, &std::pair<int64_t, const Json*>::first);
  Json entries = Json::array();
  for (const auto& [nanos, event] : found) {
    Json entry = *event;
    entry["timestamp"] = TimeText(absl::FromUnixNanos(nanos));
    for (const char* const old : {"model_id", "tinker_path", "purpose"}) {
      const auto value = (*event)["event_details"].find(old);
      if (value != (*event)["event_details"].end()) entry[old] = *value;
    }
    entries.push_back(std::move(entry));
  }
  return Json{{"entries", entries}};
}

}  // namespace weft::server::tinker
