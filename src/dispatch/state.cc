#include "src/dispatch/state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"
#include "src/request/move_unit.h"

namespace weft::dispatch {

absl::Status NoSuchAdapter(const std::string& adapter_id) {
  return WithReason(
      absl::NotFoundError(
          absl::StrCat("adapter_id: '", adapter_id, "' does not exist")),
      {.name = "NO_SUCH_ADAPTER", .values = {{"adapter", adapter_id}}});
}

absl::Status NotReady(absl::string_view what,
                      std::map<std::string, std::string> values) {
  return WithReason(
      absl::UnavailableError(absl::StrCat(
          what, " being restored from the log of --state-dir; try again")),
      {.name = "ADAPTER_RECOVERING", .values = std::move(values)});
}

namespace {

// A move of a small adapter takes a third of a second.
constexpr char kHeldRetryMillis[] = "100";

// If no steps are recorded, replies do not wait for the disk.
Environment WithDurable(Environment environment) {
  if (!environment.post_durable) {
    environment.post_durable = environment.post_reply;
  }
  return environment;
}

}  // namespace

State::State(const Options& opts, Environment environment)
    : options(opts),
      env(WithDurable(std::move(environment))),
      scheduler(opts.scheduler),
      residency(opts.residency),
      replies(opts.max_stored_reply_bytes) {}

absl::Status State::CheckOpen() const {
  if (draining || stopping) {
    return WithReason(
        absl::UnavailableError("the server is draining; try another one"),
        {.name = "DRAINING", .values = {}});
  }
  return absl::OkStatus();
}

absl::Status State::CheckReady(const std::string& id) const {
  if (held_units.empty() || !held_units.contains(UnitOf(id))) {
    if (!recovering.contains(id)) return absl::OkStatus();
    return NotReady(absl::StrCat("adapter_id: '", id, "' is"),
                    {{"adapter", id}});
  }
  return WithReason(
      absl::UnavailableError(absl::StrCat("adapter_id: '", id,
                                          "' goes to another server; try "
                                          "again")),
      {.name = "ADAPTER_RECOVERING",
       .values = {{"adapter", id}, {"retry_ms", kHeldRetryMillis}}});
}

std::optional<AdapterKey> State::KeyOf(const std::string& id) const {
  if (id.empty()) return AdapterKey::kBaseModel;
  const auto it = keys.find(id);
  if (it == keys.end()) return std::nullopt;
  return it->second;
}

AdapterKey State::SchedulersKey(AdapterKey adapter, const std::string& tenant) {
  if (adapter != AdapterKey::kBaseModel || tenant.empty()) return adapter;
  const uint64_t next =
      static_cast<uint64_t>(AdapterKey::kFirstTenantsBaseModel) +
      base_models.size();
  const auto [it, is_new] =
      base_models.try_emplace(tenant, static_cast<AdapterKey>(next));
  if (is_new) {
    scheduler.AddAdapter(it->second, /*name=*/"", tenant, /*last_step=*/0);
  }
  return it->second;
}

AdapterRecord* State::Find(const std::string& id) {
  const auto key = keys.find(id);
  return key == keys.end() ? nullptr : Find(key->second);
}

AdapterRecord* State::Find(AdapterKey adapter) {
  const auto it = adapters.find(adapter);
  return it == adapters.end() ? nullptr : &it->second;
}

AdapterInfo State::InfoOf(AdapterKey adapter) const {
  AdapterInfo info = adapters.at(adapter).info;
  info.next_step = scheduler.NextStep(adapter);
  return info;
}

void State::WantAdapter(AdapterKey adapter) {
  if (residency.Want(adapter)) {
    adapters.at(adapter).wanted_at = env.clock->Now();
  }
}

TeacherName State::TeacherOf(const TrainRequest& request) const {
  if (!HasTeacher(request.loss.function)) return {};
  const Teacher& teacher = request.loss.teacher;
  return {.adapter = KeyOf(teacher.adapter_id).value_or(AdapterKey{}),
          .snapshot = teacher.snapshot};
}

absl::Status State::Queue(std::unique_ptr<StepWork> work, WorkItem item) {
  AdapterRecord* const record = Find(work->adapter);
  item.recorded = IsRecorded(record);
  const auto* const train = std::get_if<TrainRequest>(&work->request);
  item.adapter = train == nullptr ? work->adapter
                                  : SchedulersKey(work->adapter, train->tenant);
  if (train != nullptr) item.teacher = TeacherOf(*train);
  work->kind = item.kind;
  work->accepted_at = env.clock->Now();
  const uint64_t id = item.id;
  const bool empty = item.empty;
  WEFT_ASSIGN_OR_RETURN(work->step,
                        scheduler.Enqueue(std::move(item), work->accepted_at));
  if (!empty) WantAdapter(work->adapter);
  if (record != nullptr) {
    record->replays.Begin(work->step, work->digest, id);
    record->info.last_used_at = absl::Now();
  }
  steps.emplace(id, std::move(work));
  return absl::OkStatus();
}

StepTask State::StartStep(uint64_t id) {
  StepWork& work = *steps.at(id);
  if (!work.started) {
    env.metrics->ObserveWait(work.kind, env.clock->Now() - work.accepted_at);
  }
  work.started = true;
  const AdapterRecord* record = Find(work.adapter);
  return {.id = id,
          .adapter = work.adapter,
          .step = work.step,
          .last_step = record == nullptr ? 0 : record->info.last_step,
          .request = &work.request,
          .digest = &work.digest,
          .trace = work.trace,
          .kept = work.note.has_value() && IsRecorded(record)};
}

uint64_t State::NewEpoch() {
  const auto now = static_cast<uint64_t>(absl::ToUnixMicros(env.clock->Now()));
  last_epoch = std::max(last_epoch + 1, now);
  return last_epoch;
}

void State::Drop(uint64_t id, const absl::Status& status) {
  if (auto step = steps.extract(id)) {
    DropStep(std::move(step.mapped()), status);
  } else if (auto sample = samples.extract(id)) {
    env.post_reply(
        [done = std::move(sample.mapped()->done), status] { done(status); });
  }
}

bool State::Withdraw(uint64_t id, const absl::Status& status) {
  if (scheduler.Remove(id)) {
    Drop(id, status);
    return true;
  }
  if (!scheduler.Empty(id)) return false;
  StepWork& work = *steps.at(id);
  work.request = RefusedStep{.adapter_id = AdapterIdOf(work.request),
                             .step = work.step,
                             .charge = ChargeOf(work.request),
                             .digest = work.digest,
                             .status = status};
  work.kind = WorkKind::kAdapterOp;
  return true;
}

void State::DropStep(std::unique_ptr<StepWork> work,
                     const absl::Status& status) {
  if (AdapterRecord* record = Find(work->adapter)) {
    record->replays.Fail(work->step);
  }
  env.post_reply([waiters = std::move(work->waiters), status] {
    for (const StepWork::Waiter& waiter : waiters) waiter.done(status, false);
  });
  // Work that waited behind this work may now be able to run.
  if (scheduler.ReadyKinds(work->adapter) != 0) WantAdapter(work->adapter);
}

std::vector<EngineTask> State::TakeTasks(AdapterKey adapter) {
  AdapterRecord* record = Find(adapter);
  return record == nullptr ? std::vector<EngineTask>()
                           : std::exchange(record->tasks, {});
}

void State::StoreReply(AdapterRecord& record, AdapterKey adapter, uint64_t step,
                       StepResultPtr result) {
  replies.Add({.tenant = record.info.tenant,
               .adapter = adapter,
               .step = step,
               .bytes = NumBytes(*result)});
  for (const uint64_t left : record.replays.Complete(step, std::move(result))) {
    replies.Remove(adapter, left);
  }
  while (const auto excess = replies.TakeExcess()) {
    adapters.at(excess->adapter).replays.DropResult(excess->step);
    env.metrics->CountDroppedReply();
  }
  env.metrics->SetStoredReplies(replies.bytes());
}

AdapterRecord& State::AddRecord(AdapterKey adapter, const AdapterInfo& info,
                                bool hidden) {
  if (!hidden) {
    keys.emplace(info.adapter_id, adapter);
    ++tenants[info.tenant].count;
    ++by_durability[static_cast<size_t>(info.durability)];
  }
  resident_bytes += info.resident_bytes;
  AdapterRecord& record = adapters[adapter];
  record.info = info;
  record.hidden = hidden;
  return record;
}

void State::RemoveRecord(AdapterKey adapter) {
  const AdapterRecord& record = adapters.at(adapter);
  const AdapterInfo& info = record.info;
  replies.RemoveAll(adapter);
  env.metrics->SetStoredReplies(replies.bytes());
  if (!record.hidden) {
    keys.erase(info.adapter_id);
    const auto tenant = tenants.find(info.tenant);
    tenant->second.bytes -= record.image_bytes;
    if (--tenant->second.count == 0) tenants.erase(tenant);
    --by_durability[static_cast<size_t>(info.durability)];
  }
  resident_bytes -= info.resident_bytes;
  adapters.erase(adapter);
}

absl::Status State::CheckBytes(const std::string& tenant) const {
  const uint64_t most = options.max_adapter_bytes_per_tenant;
  const auto held = tenants.find(tenant);
  if (most == 0 || held == tenants.end() || held->second.bytes < most) {
    return absl::OkStatus();
  }
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "the adapters of tenant '", tenant, "' and their snapshots hold ",
          held->second.bytes, " bytes, it may have ", most,
          " (--max-adapter-bytes-per-tenant); delete one, or ReleaseSnapshot")),
      {.name = "ADAPTER_BYTES",
       .values = {{"limit", absl::StrCat(most)},
                  {"held", absl::StrCat(held->second.bytes)},
                  {"tenant", tenant}}});
}

void State::SetFacts(AdapterRecord& record, const AdapterFacts& facts) {
  const bool shown = record.info.resident_bytes == facts.info.resident_bytes;
  resident_bytes -= record.info.resident_bytes;
  resident_bytes += facts.info.resident_bytes;
  AdapterInfo info = facts.info;
  info.adapter_id = record.info.adapter_id;
  info.tenant = record.info.tenant;
  info.epoch = record.info.epoch;
  info.durability = record.info.durability;
  info.last_step = record.info.last_step;
  info.durable_step = record.info.durable_step;
  info.last_used_at = record.info.last_used_at;
  record.info = std::move(info);
  if (!record.hidden) {
    uint64_t& held = tenants[record.info.tenant].bytes;
    held += facts.image_bytes - record.image_bytes;
  }
  record.image_bytes = facts.image_bytes;
  if (!shown) ShowAdapters();
}

void State::ShowAdapters() {
  env.metrics->SetAdapters(residency.Counts(), resident_bytes);
  env.metrics->SetDurabilities(by_durability);
  env.metrics->SetRecovering(recovering.size());
}

State::Recovering State::CountRecovering(const std::string* tenant) const {
  Recovering count;
  for (const auto& [id, owner] : recovering) {
    if (tenant != nullptr && owner != *tenant) continue;
    ++(keys.contains(id) ? count.made : count.unmade);
  }
  return count;
}

}  // namespace weft::dispatch
