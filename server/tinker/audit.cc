#include "server/tinker/audit.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "server/field_checks.h"
#include "server/tinker/jwt.h"
#include "server/tinker/runs.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// Returns the ledger's id of an event.
std::string EventId(const std::string& owner, int64_t nanos) {
  return absl::StrCat(owner, " ", nanos);
}

// Returns the day [begin, end) that the query asks for.
absl::StatusOr<std::pair<int64_t, int64_t>> QueryDay(const Call& call) {
  const absl::TimeZone utc = absl::UTCTimeZone();
  const auto found = call.query.find("day");
  absl::Time day = absl::Now();
  if (found != call.query.end() &&
      !absl::ParseTime("%Y-%m-%d", found->second, &day, nullptr)) {
    return BadField("day", "must be a date in the form 2026-01-31");
  }
  // Nanoseconds of other days, such as infinite-future, are no int64_t.
  if (found != call.query.end() &&
      (day < absl::UnixEpoch() ||
       day > absl::FromCivil(absl::CivilDay(2200, 1, 1), utc))) {
    return BadField("day",
                    absl::StrCat("is ", Quoted(found->second),
                                 ", must be in [1970-01-01, 2200-01-01]"));
  }
  const absl::CivilDay civil = absl::ToCivilDay(day, utc);
  return std::pair(absl::ToUnixNanos(absl::FromCivil(civil, utc)),
                   absl::ToUnixNanos(absl::FromCivil(civil + 1, utc)));
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
       .fields = {{"owner", owner}, {"nanos", now}, {"event", event}},
       .bytes = ""},
      [](const absl::Status& put) {
        if (put.ok()) return;
        Log(LogLevel::kError, "an audit event will not outlive the server",
            {{"error", std::string(put.message())}});
      });
  auto charge = front.ChargeEntry(owner, path.ToString().size());
  events.emplace(now, KeptEvent{.event = std::move(event),
                                .charge = std::move(charge).value_or(nullptr)});
  if (events.size() <= kMaxEvents) return;
  front.ledger.Erase(EntryKind::kEvent, EventId(owner, events.begin()->first));
  events.erase(events.begin());
}

void RestoreEvents(Front& front) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kEvent)) {
    const std::string owner = entry.fields.value("owner", "");
    Json& event = entry.fields["event"];
    auto charge = front.ChargeEntry(owner, event.dump().size());
    front.events[owner][entry.fields.value("nanos", int64_t{0})] = {
        .event = std::move(event),
        .charge = std::move(charge).value_or(nullptr)};
  }
}

absl::Status GetAuditLog(Front& front, const CallPtr& call,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const auto day, QueryDay(*call));
  const auto type = call->query.find("event_type");
  const bool wanted = type == call->query.end() || type->second == "all" ||
                      type->second == "checkpoints";
  std::vector<std::pair<int64_t, const Json*>> found;
  for (const auto& [owner, events] : front.events) {
    if (!wanted) break;
    if (!call->caller.sees_all() && owner != call->owner()) continue;
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
  respond(JsonReply({{"entries", entries}}));
  return absl::OkStatus();
}

}  // namespace weft::tinker
