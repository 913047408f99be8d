#include "server/tinker/usage.h"

#include <algorithm>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/field_checks.h"
#include "server/tinker/jwt.h"
#include "server/tinker/runs.h"
#include "src/base/status_macros.h"
#include "weft/v1/adapters.pb.h"

namespace weft::tinker {
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
    row->second.charge =
        front.ChargeEntry(key.owner, key.session.size()).value_or(nullptr);
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
      front.ledger.Put(
          EntryKind::kUsage,
          {.id = EntryId(key), .fields = std::move(fields), .bytes = ""},
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

absl::Status GetUsage(Front& front, const CallPtr& call,
                      const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const int64_t begin, QueryHour(*call, "starting_on"));
  WEFT_ASSIGN_OR_RETURN(const int64_t end, QueryHour(*call, "ending_before"));
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
    if (!call->caller.sees_all() && key.owner != call->owner()) continue;
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
    Json metadata = Shown(session->second.user_metadata);
    if (metadata.is_object()) shown["user_metadata"] = std::move(metadata);
  }
  Json data = Json::array();
  for (Event& event : events) data.push_back(std::move(std::get<2>(event)));
  respond(JsonReply({{"data", data}, {"sessions", sessions}}));
  return absl::OkStatus();
}

absl::Status GetStorage(Front& front, const CallPtr& call,
                        const Respond& respond) {
  if (call->query.contains("project_id")) return NoProjects("project_id");
  v1::ListCheckpointsRequest request;
  return front.port.Call(
      call->origin(), Rpc::kListCheckpoints, request, &Engine::ListCheckpoints,
      [call, one = front.port.core()->authenticator == nullptr,
       respond](const absl::StatusOr<std::vector<CheckpointInfo>>& found) {
        if (!found.ok()) return respond(ErrorReply(found.status()));
        std::map<std::string, std::pair<int64_t, int64_t>> by_tenant;
        for (const CheckpointInfo& info : *found) {
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
        respond(JsonReply({{"data", data}}));
      });
}

}  // namespace weft::tinker
