#include "server/tinker/accounts.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/credentials.h"
#include "server/tinker/handlers.h"
#include "server/tinker/wire/fields.h"
#include "server/wire/field_checks.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
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

Accounts::UsageRow& Accounts::RowOf(const UsageKey& key) {
  const auto [row, made] = usage_.try_emplace(key);
  if (made) {
    row->second.charge = ledger_.ChargeIfRoom(key.owner, key.session.size());
  }
  return row->second;
}

void Accounts::Count(const std::string& owner, const std::string& session,
                     const UsageCounts& counts) {
  UsageKey key{.owner = owner, .hour = HourOf(absl::Now()), .session = session};
  if (!usage_.contains(key)) {
    int64_t rows = 0;
    for (auto row = usage_.lower_bound({.owner = owner});
         row != usage_.end() && row->first.owner == owner; ++row) {
      ++rows;
    }
    if (rows >= kMaxUsageRows) key.session.clear();
  }
  UsageRow& row = RowOf(key);
  Add(row.counts, counts);
  row.changed = true;
}

void Accounts::Put(const UsageKey& key, const UsageCounts& counts) {
  Json fields = {
      {"owner", key.owner}, {"hour", key.hour}, {"session", key.session}};
  for (const auto& [name, count] : kCounts) fields[name] = counts.*count;
  ledger_.Put(EntryKind::kUsage,
              {.id = EntryId(key), .fields = std::move(fields)},
              [this, key](const absl::Status& put) {
                const auto found = usage_.find(key);
                if (!put.ok() && found != usage_.end()) {
                  found->second.changed = true;
                }
              });
}

void Accounts::Sweep(absl::Time now) {
  const int64_t oldest = HourOf(now - kUsageTime);
  for (auto row = usage_.begin(); row != usage_.end();) {
    const UsageKey& key = row->first;
    if (key.hour < oldest) {
      ledger_.Erase(EntryKind::kUsage, EntryId(key));
      row = usage_.erase(row);
      continue;
    }
    if (std::exchange(row->second.changed, false)) Put(key, row->second.counts);
    ++row;
  }
}

void Accounts::Restore() {
  for (const LedgerEntry& entry : ledger_.ReadAll(EntryKind::kUsage)) {
    const Json& fields = entry.fields;
    UsageCounts& counts = RowOf({.owner = fields.value("owner", ""),
                                 .hour = fields.value("hour", int64_t{0}),
                                 .session = fields.value("session", "")})
                              .counts;
    for (const auto& [name, count] : kCounts) {
      counts.*count = fields.value(name, int64_t{0});
    }
  }
  for (LedgerEntry& entry : ledger_.ReadAll(EntryKind::kEvent)) {
    const std::string owner = entry.fields.value("owner", "");
    Json& event = entry.fields["event"];
    auto charge = ledger_.ChargeIfRoom(owner, event.dump().size());
    events_[owner][entry.fields.value("nanos", int64_t{0})] = {
        .event = std::move(event), .charge = std::move(charge)};
  }
}

void Accounts::ForEachCount(
    const Caller& caller, int64_t begin, int64_t end,
    const std::function<void(const UsageKey&, const UsageCounts&)>& use) const {
  for (const auto& [key, row] : usage_) {
    if (key.hour < begin || key.hour >= end) continue;
    if (caller.sees_all() || key.owner == OwnerKey(caller)) {
      use(key, row.counts);
    }
  }
}

std::vector<std::pair<int64_t, Json>> Accounts::Events(const Caller& caller,
                                                       int64_t begin,
                                                       int64_t end) const {
  std::vector<std::pair<int64_t, Json>> found;
  for (const auto& [owner, events] : events_) {
    if (!caller.sees_all() && owner != OwnerKey(caller)) continue;
    for (auto event = events.lower_bound(begin);
         event != events.end() && event->first < end; ++event) {
      found.emplace_back(event->first, event->second.event);
    }
  }
  std::ranges::stable_sort(found, {}, &std::pair<int64_t, Json>::first);
  return found;
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
  const auto add = [&](const UsageKey& key, const UsageCounts& counts) {
    for (Used& used : UsedOf(counts)) {
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
  };
  front.accounts.ForEachCount(call.caller, begin, end, add);
  std::ranges::stable_sort(events, {}, [](const Event& event) {
    return std::pair(std::get<0>(event), std::get<1>(event));
  });
  for (auto& [id, shown] : sessions.items()) {
    const Session* const session = front.sessions.Find(id);
    if (session != nullptr) ShowMetadata(session->user_metadata, &shown);
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

Json EventOf(const Caller& caller, const char* action,
             const CheckpointPath& path, const char* purpose) {
  Json details = {{"actor", UserOf(caller)},
                  {"tinker_path", path.ToString()},
                  {"model_id", path.run}};
  if (*purpose != '\0') details["purpose"] = purpose;
  return {{"event", absl::StrCat("checkpoint_", action)},
          {"event_details", std::move(details)}};
}

}  // namespace

void Accounts::Note(const Caller& caller, const char* action,
                    const CheckpointPath& path, const char* purpose) {
  const std::string owner = OwnerKey(caller);
  std::map<int64_t, KeptEvent>& events = events_[owner];
  int64_t now = absl::ToUnixNanos(absl::Now());
  // Events of one moment need different keys.
  if (!events.empty()) now = std::max(now, events.rbegin()->first + 1);
  Json event = EventOf(caller, action, path, purpose);
  ledger_.Put(EntryKind::kEvent,
              {.id = EventId(owner, now),
               .fields = {{"owner", owner}, {"nanos", now}, {"event", event}}},
              [](const absl::Status& put) {
                if (put.ok()) return;
                Log(LogLevel::kError,
                    "an audit event will not outlive the server",
                    {{"error", std::string(put.message())}});
              });
  auto charge = ledger_.ChargeIfRoom(owner, path.ToString().size());
  events[now] = {.event = std::move(event), .charge = std::move(charge)};
  if (events.size() <= kMaxEvents) return;
  ledger_.Erase(EntryKind::kEvent, EventId(owner, events.begin()->first));
  events.erase(events.begin());
}

void Accounts::NoteSample(const Caller& caller, const CheckpointPath& path) {
  const Json event = EventOf(caller, "read", path, "sample");
  const auto& events = events_[OwnerKey(caller)];
  const auto recent =
      events.lower_bound(absl::ToUnixNanos(absl::Now() - absl::Hours(1)));
  const bool noted = std::any_of(
      recent, events.end(),
      [&event](const auto& one) { return one.second.event == event; });
  if (!noted) Note(caller, "read", path, "sample");
}

absl::StatusOr<Json> GetAuditLog(Front& front, const Call& call) {
  WEFT_ASSIGN_OR_RETURN(const auto day, QueryDay(call));
  const auto type = call.query.find("event_type");
  const bool wanted = type == call.query.end() || type->second == "all" ||
                      type->second == "checkpoints";
  Json entries = Json::array();
  if (!wanted) return Json{{"entries", entries}};
  for (auto& [nanos, event] :
       front.accounts.Events(call.caller, day.first, day.second)) {
    const Json details = event["event_details"];
    event["timestamp"] = TimeText(absl::FromUnixNanos(nanos));
    for (const char* const old : {"model_id", "tinker_path", "purpose"}) {
      const auto value = details.find(old);
      if (value != details.end()) event[old] = *value;
    }
    entries.push_back(std::move(event));
  }
  return Json{{"entries", entries}};
}

}  // namespace weft::server::tinker
