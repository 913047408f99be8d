#include "server/console/state.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "server/call/metric_values.h"
#include "server/flags/version.h"
#include "src/base/clock.h"

namespace weft::server::console {
namespace {

using Json = nlohmann::json;

// The most adapters that one call of ListAdapters reads. The call holds the
// dispatcher's lock, so it must be short.
constexpr size_t kAdaptersPerPage = 100;
// The most TrainPoints of a listed adapter, and of the selected adapter.
constexpr size_t kListedPoints = 32;
constexpr size_t kSelectedPoints = 256;
constexpr size_t kMaxSnapshots = 50;
constexpr char kLossCurve[] = "loss";

// An adapter, and its total numbers of tokens.
struct Entry {
  AdapterInfo info;
  std::string engine_name;
  AdapterActivity totals;  // Without points, updates and curves.
};

double Seconds(absl::Time time) {
  return static_cast<double>(absl::ToUnixMillis(time)) / 1000;
}

// Returns the value with about five digits, which are enough to draw it; null
// if it is not finite.
Json Rounded(float value) {
  if (!std::isfinite(value)) return nullptr;
  if (value == 0) return 0;
  const double scale =
      std::pow(10.0, 4 - std::floor(std::log10(std::abs(double{value}))));
  return std::isfinite(scale) ? std::round(value * scale) / scale : 0;
}

std::vector<Entry> AllAdapters(engine::Engine& engine, const Caller& caller) {
  std::vector<Entry> entries;
  ActivityQuery query;
  bool more = true;
  while (more) {
    ListAdaptersRequest request{.size = kAdaptersPerPage};
    if (!entries.empty()) request.after = entries.back().info.adapter_id;
    (void)caller.Qualify(FieldsOf(&request));
    // The callback runs before ListAdapters returns.
    engine.ListAdapters(request, [&](absl::StatusOr<AdapterPage> page) {
      more = page.ok() && page->more;
      if (!page.ok()) return;
      caller.Reveal(&*page);
      more = page->more && !page->adapters.empty();
      for (AdapterInfo& info : page->adapters) {
        std::string name = info.adapter_id;
        (void)caller.Qualify(FieldsOf(&name));
        query.adapter_ids.push_back(name);
        entries.push_back({.info = std::move(info), .engine_name = name});
      }
    });
  }
  const Activity activity = engine.activity(query);
  for (size_t i = 0; i < entries.size(); ++i) {
    entries[i].totals = activity.adapters[i];
  }
  return entries;
}

Json ServerJson(const ServiceCore& core, const engine::Engine* engine) {
  const char* const phase = core.engine.draining() ? "draining"
                            : engine == nullptr    ? "loading"
                                                   : "serving";
  Json out = {{"version", std::string(kVersion)},
              {"git", std::string(kGitRevision)},
              {"model", core.options.model_name},
              {"phase", phase}};
  if (engine == nullptr) return out;
  const EngineInfo& info = engine->info();
  out["silent_seconds"] =
      std::round(absl::ToDoubleSeconds(SteadyNow() - engine->last_heartbeat()));
  out["device"] = info.device;
  out["dtype"] = info.dtype;
  out["architecture"] = info.architecture;
  out["parameters"] = info.num_parameters;
  out["context_length"] = info.context_length;
  return out;
}

// Returns the median and the 99th percentile of what the histogram has observed
// lately.
Json Percentiles(const LoadHistory& history, const MetricValues& values,
                 const char* name) {
  return {history.Recent(values, name, 0.5),
          history.Recent(values, name, 0.99)};
}

// Returns "load": the calls, steps, waits, memory, disks and adapters of the
// whole server.
Json LoadJson(const LoadHistory& history, const MetricValues& values) {
  return {{"uptime_seconds", std::round(values.UptimeSeconds())},
          {"queue_wait", Percentiles(history, values, kQueueWaitMetric)},
          {"first_token", Percentiles(history, values, kFirstTokenMetric)},
          {"disk_free", values.ByLabel("weft_disk_free_bytes")},
          {"disk_size", values.ByLabel("weft_disk_size_bytes")},
          {"calls_in_flight", values.Sum("weft_requests_inflight")},
          {"optim_steps", values.Sum("weft_optim_steps_total")},
          {"resident_bytes", values.Sum("process_resident_memory_bytes")},
          {"device_bytes", values.Sum("weft_device_memory_bytes")},
          {"device_used_bytes", values.Sum("weft_device_allocated_bytes")},
          {"parts", values.ByLabel("weft_memory_part_bytes")},
          {"kv_bytes", values.Sum("weft_kv_cache_capacity_bytes")},
          {"kv_used_bytes", values.Sum("weft_kv_cache_used_bytes")},
          {"adapter_bytes", values.Sum("weft_adapter_bytes")},
          {"adapters_at", values.ByLabel("weft_adapters")}};
}

// Returns at most kMaxTenants tenants that have adapters, in the order of
// names. Leaves out a tenant that has the name of its adapter: on a server
// without tokens, an adapter may be its own tenant.
Json TenantsJson(const engine::Engine& engine,
                 const std::vector<Entry>& entries) {
  std::map<std::string, AdapterActivity> totals;
  for (const Entry& entry : entries) {
    if (entry.info.tenant == entry.info.adapter_id) continue;
    AdapterActivity& sum = totals[entry.info.tenant];
    sum.train_tokens += entry.totals.train_tokens;
    sum.sampled_tokens += entry.totals.sampled_tokens;
  }
  ActivityQuery query;
  for (const auto& [tenant, sum] : totals) {
    if (query.tenants.size() < kMaxTenants) query.tenants.push_back(tenant);
  }
  const Activity activity = engine.activity(query);
  Json out = Json::array();
  for (size_t i = 0; i < query.tenants.size(); ++i) {
    const AdapterActivity& sum = totals[query.tenants[i]];
    out.push_back({{"tenant", query.tenants[i]},
                   {"adapters", activity.tenants[i].num_adapters},
                   {"bytes", activity.tenants[i].adapter_bytes},
                   {"queued", activity.tenants[i].queued_requests},
                   {"train_tokens", sum.train_tokens},
                   {"sampled_tokens", sum.sampled_tokens}});
  }
  return out;
}

// Sets "tokens" and "queued" to the numbers that the caller may see. For a
// caller who sees all adapters, also sets "load" and "tenants".
void FillTotals(const ServiceCore& core, const engine::Engine& engine,
                const Caller& caller, const std::vector<Entry>& entries,
                Json* out) {
  if (caller.sees_all()) {
    const MetricValues values(*core.registry);
    (*out)["tokens"] = {{"train", values.Sum("weft_train_tokens_total")},
                        {"sampled", values.Sum("weft_sampled_tokens_total")}};
    (*out)["queued"] = values.ByLabel("weft_queue_depth");
    (*out)["load"] = LoadJson(core.history, values);
    (*out)["server"]["restore_seconds"] =
        std::round(values.Sum(kRestoreSecondsMetric));
    (*out)["tenants"] = TenantsJson(engine, entries);
    return;
  }
  AdapterActivity sum;
  for (const Entry& entry : entries) {
    sum.train_tokens += entry.totals.train_tokens;
    sum.sampled_tokens += entry.totals.sampled_tokens;
  }
  const Activity own = engine.activity({.tenants = {caller.tenant()}});
  (*out)["tokens"] = {{"train", sum.train_tokens},
                      {"sampled", sum.sampled_tokens}};
  (*out)["queued"] = {{"all", own.tenants[0].queued_requests}};
}

// Returns the adapter's curve of this name; see state.h for the loss. It has no
// points if there is no such curve.
MetricCurve CurveOf(const AdapterActivity& activity, const std::string& name) {
  const auto reported =
      std::ranges::find(activity.curves, name, &MetricCurve::name);
  if (reported != activity.curves.end()) return *reported;
  MetricCurve curve{.name = name};
  if (name != kLossCurve) return curve;
  for (const TrainPoint& point : activity.points) {
    if (point.surrogate) continue;
    curve.points.push_back(
        {.optim_steps = point.optim_steps, .value = point.loss});
  }
  return curve;
}

Json ValuesOf(const MetricCurve& curve) {
  Json values = Json::array();
  for (const MetricCurve::Point& point : curve.points) {
    values.push_back(Rounded(point.value));
  }
  return values;
}

Json CurveJson(const MetricCurve& curve) {
  Json at = Json::array();
  for (const MetricCurve::Point& point : curve.points) {
    at.push_back(point.optim_steps);
  }
  return {
      {"name", curve.name}, {"at", std::move(at)}, {"values", ValuesOf(curve)}};
}

bool Matches(const AdapterInfo& info, const std::string& search) {
  const auto has = [&search](const std::string& text) {
    return absl::StrContains(absl::AsciiStrToLower(text), search);
  };
  return search.empty() || has(info.adapter_id) || has(info.tenant);
}

Json AdapterJson(const Entry& entry, const AdapterActivity& latest) {
  constexpr const char* kLocations[] = {"device", "host", "disk"};
  const AdapterInfo& info = entry.info;
  return {{"id", info.adapter_id},
          {"tenant", info.tenant},
          {"rank", info.config.rank},
          {"step", info.last_step},
          {"durable_step", info.durable_step},
          {"epoch", info.epoch},
          {"optim_steps", info.optim_steps},
          {"version", info.version},
          {"bytes", info.resident_bytes},
          {"location", kLocations[static_cast<size_t>(info.location)]},
          {"restoring", info.restoring},
          {"last_used_at", Seconds(info.last_used_at)},
          {"train_tokens", entry.totals.train_tokens},
          {"sampled_tokens", entry.totals.sampled_tokens},
          {"accumulated_tokens", info.accumulated_tokens},
          {"losses", ValuesOf(CurveOf(latest, kLossCurve))}};
}

Json SelectedJson(const engine::Engine& engine, const Entry& entry) {
  const Activity activity = engine.activity({.adapter_ids = {entry.engine_name},
                                             .tenants = {},
                                             .max_points = kSelectedPoints});
  const AdapterInfo& info = entry.info;
  Json out = {{"id", info.adapter_id},
              {"alpha", info.config.alpha},
              {"parameters", info.num_parameters},
              {"created_at", Seconds(info.created_at)},
              {"num_snapshots", info.snapshots.size()},
              {"snapshots", Json::array()},
              {"targets", Json::array()},
              {"curves", Json::array()},
              {"surrogate", false},
              {"steps", Json::array()},
              {"losses", Json::array()},
              {"tokens", Json::array()},
              {"ended_at", Json::array()},
              {"update_steps", Json::array()},
              {"grad_norms", Json::array()}};
  for (const std::string& name : info.snapshots) {
    if (out["snapshots"].size() < kMaxSnapshots) {
      out["snapshots"].push_back(name);
    }
  }
  for (const TargetModule module : info.config.target_modules) {
    out["targets"].push_back(TargetModuleName(module));
  }
  for (const MetricCurve& curve : activity.adapters[0].curves) {
    out["curves"].push_back(CurveJson(curve));
  }
  for (const TrainPoint& point : activity.adapters[0].points) {
    out["surrogate"] = point.surrogate;
    out["steps"].push_back(point.step);
    out["losses"].push_back(Rounded(point.loss));
    out["tokens"].push_back(point.num_tokens);
    out["ended_at"].push_back(Seconds(point.ended_at));
  }
  for (const UpdatePoint& update : activity.adapters[0].updates) {
    out["update_steps"].push_back(update.step);
    out["grad_norms"].push_back(Rounded(update.grad_norm));
  }
  return out;
}

// Returns the curves of this name of the adapters that were used last.
Json ComparedJson(const engine::Engine& engine, const std::string& curve,
                  std::vector<const Entry*> entries) {
  const auto used = [](const Entry* entry) { return entry->info.last_used_at; };
  std::ranges::sort(entries, std::greater(), used);
  if (entries.size() > kMaxCompared) entries.resize(kMaxCompared);
  ActivityQuery query{.max_points = kSelectedPoints};
  for (const Entry* entry : entries) {
    query.adapter_ids.push_back(entry->engine_name);
  }
  const Activity activity = engine.activity(query);
  Json out = Json::array();
  for (size_t i = 0; i < entries.size(); ++i) {
    Json compared = CurveJson(CurveOf(activity.adapters[i], curve));
    compared["id"] = entries[i]->info.adapter_id;
    out.push_back(std::move(compared));
  }
  return out;
}

// Returns the adapters that match `search`, which is in lower case, in the
// order of ids. If more than kMaxAdapters match, returns the most recently used
// ones. Sets `*matching` to the number of all that match.
std::vector<const Entry*> Listed(const std::vector<Entry>& entries,
                                 const std::string& search, size_t* matching) {
  std::vector<const Entry*> found;
  for (const Entry& entry : entries) {
    if (Matches(entry.info, search)) found.push_back(&entry);
  }
  *matching = found.size();
  if (found.size() > kMaxAdapters) {
    const auto used = [](const Entry* entry) {
      return entry->info.last_used_at;
    };
    std::ranges::nth_element(found, found.begin() + kMaxAdapters,
                             std::greater(), used);
    found.resize(kMaxAdapters);
    std::ranges::sort(found, std::less(), [](const Entry* entry) {
      return entry->info.adapter_id;
    });
  }
  return found;
}

void FillAdapters(const engine::Engine& engine,
                  const std::vector<Entry>& entries, const StateQuery& query,
                  Json* out) {
  size_t matching = 0;
  const std::vector<const Entry*> listed =
      Listed(entries, absl::AsciiStrToLower(query.search), &matching);
  ActivityQuery points{.max_points = kListedPoints};
  for (const Entry* entry : listed) {
    points.adapter_ids.push_back(entry->engine_name);
  }
  const Activity activity = engine.activity(points);
  Json rows = Json::array();
  for (size_t i = 0; i < listed.size(); ++i) {
    rows.push_back(AdapterJson(*listed[i], activity.adapters[i]));
  }
  (*out)["num_adapters"] = entries.size();
  (*out)["num_restoring"] = std::ranges::count_if(
      entries, [](const Entry& entry) { return entry.info.restoring; });
  (*out)["num_matching"] = matching;
  (*out)["adapters"] = std::move(rows);
  if (!query.compare.empty()) {
    (*out)["compared"] = ComparedJson(engine, query.compare, listed);
  }
  for (const Entry& entry : entries) {
    if (entry.info.adapter_id == query.selected) {
      (*out)["selected"] = SelectedJson(engine, entry);
    }
  }
}

Json HistoryJson(const LoadHistory& history) {
  Json out = Json::array();
  for (const LoadHistory::Rates& rates : history.rates()) {
    out.push_back({Seconds(rates.at), std::round(rates.train_tokens * 10) / 10,
                   std::round(rates.sampled_tokens * 10) / 10});
  }
  return out;
}

Json ErrorsJson(const ServiceCore& core, const Caller& caller) {
  Json out = Json::array();
  for (const CallError& error : core.errors.Latest(caller, kMaxErrors)) {
    out.push_back({{"rpc", error.rpc},
                   {"code", absl::StatusCodeToString(error.code)},
                   {"reason", error.reason},
                   {"adapter", error.adapter_id},
                   {"tenant", error.tenant},
                   {"at", Seconds(error.at)},
                   {"count", error.count}});
  }
  return out;
}

}  // namespace

Json MakeState(const ServiceCore& core, const Caller& caller,
               const StateQuery& query) {
  engine::Engine* const engine = core.engine.Peek();
  Json out = {{"now", Seconds(absl::Now())},
              {"server", ServerJson(core, engine)},
              {"caller",
               {{"token", caller.token_id()},
                {"tenant", caller.tenant()},
                {"sees_all", caller.sees_all()}}},
              {"errors", ErrorsJson(core, caller)}};
  if (engine == nullptr) return out;
  const std::vector<Entry> entries = AllAdapters(*engine, caller);
  FillTotals(core, *engine, caller, entries, &out);
  FillAdapters(*engine, entries, query, &out);
  if (query.history && caller.sees_all()) {
    out["history"] = HistoryJson(core.history);
  }
  return out;
}

Json CheckpointsJson(std::vector<CheckpointInfo> checkpoints) {
  std::ranges::sort(checkpoints, std::greater(), &CheckpointInfo::created_at);
  if (checkpoints.size() > kMaxCheckpoints) checkpoints.resize(kMaxCheckpoints);
  Json out = Json::array();
  for (const CheckpointInfo& info : checkpoints) {
    out.push_back({{"name", info.name},
                   {"step", info.last_step},
                   {"optim_steps", info.optim_steps},
                   {"bytes", info.size_bytes},
                   {"created_at", Seconds(info.created_at)}});
  }
  return out;
}

}  // namespace weft::server::console
