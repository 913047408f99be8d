#include "src/dispatch/adapter_desk.h"

#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"
#include "src/base/trace_id.h"

namespace weft::dispatch {
namespace {

// Returns the error for clients whose work did not run because a move failed.
// RESOURCE_EXHAUSTED and UNAVAILABLE keep their code, because clients may try
// again. Any other error becomes INTERNAL.
absl::Status MoveFailed(const Move& move, const std::string& adapter_id,
                        const absl::Status& status) {
  const std::string text =
      move.to == AdapterLocation::kDevice
          ? absl::StrCat("adapter_id: '", adapter_id,
                         "' could not be moved in: ", status.message())
          // The adapter may belong to another tenant, so the message does not
          // name it.
          : absl::StrCat(
                "no room on the device: another adapter could not be moved "
                "out: ",
                status.message());
  const bool known =
      absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
  return {known ? status.code() : absl::StatusCode::kInternal, text};
}

// Returns what is known of an adapter, its id and tenant, that the replay will
// make.
AdapterInfo NotMadeYet(const std::pair<const std::string, std::string>& owned) {
  return {.adapter_id = owned.first,
          .tenant = owned.second,
          .config = {.rank = 0, .alpha = 0, .target_modules = {}},
          .durability = Durability::kStep,
          .location = AdapterLocation::kDisk};
}

// Returns UNAVAILABLE (ADAPTER_RECOVERING) if the rest of the replay decides
// whether `limit` is reached. `recovering.unmade` is the number of adapters
// that the rest of the replay will add. `recovering.made` is the number of
// adapters that it may remove.
absl::Status CheckSettled(int num_adapters, int limit,
                          const State::Recovering& recovering) {
  const bool full = num_adapters + recovering.unmade >= limit;
  if (!full || num_adapters - recovering.made >= limit) return absl::OkStatus();
  return NotReady("adapters that may take the last slots are", {});
}

}  // namespace

absl::StatusOr<AdapterInfo> AdapterDesk::Info(const std::string& id) const {
  MutexLock lock(&s_.mu);
  const auto key = s_.keys.find(id);
  if (key == s_.keys.end()) return NoSuchAdapter(id);
  return s_.InfoOf(key->second);
}

absl::StatusOr<AdapterPage> AdapterDesk::List(
    const ListAdaptersRequest& request) const {
  AdapterPage page;
  MutexLock lock(&s_.mu);
  const auto belongs = [&request](const auto& next, const auto& all) {
    return next != all.end() && next->first.starts_with(request.prefix);
  };
  auto made = s_.keys.upper_bound(request.after);
  auto restoring = s_.recovering.upper_bound(request.after);
  while (page.adapters.size() < request.size) {
    const bool has_made = belongs(made, s_.keys);
    const bool has_restoring = belongs(restoring, s_.recovering);
    if (!has_made && !has_restoring) break;
    const bool is_made =
        has_made && (!has_restoring || made->first <= restoring->first);
    const bool is_restoring =
        has_restoring && (!is_made || made->first == restoring->first);
    AdapterInfo& info = page.adapters.emplace_back(
        is_made ? s_.InfoOf((made++)->second) : NotMadeYet(*restoring));
    info.restoring = is_restoring;
    if (is_restoring) ++restoring;
  }
  page.more = belongs(made, s_.keys) || belongs(restoring, s_.recovering);
  return page;
}

size_t AdapterDesk::Count() const {
  MutexLock lock(&s_.mu);
  return s_.keys.size() +
         static_cast<size_t>(s_.CountRecovering(nullptr).unmade);
}

Activity AdapterDesk::Watch(const ActivityQuery& query) const {
  Activity activity;
  for (const std::string& id : query.adapter_ids) {
    MutexLock lock(&s_.mu);
    const AdapterRecord* const record = s_.Find(id);
    activity.adapters.push_back(record == nullptr
                                    ? AdapterActivity()
                                    : record->history.Latest(query.max_points));
  }
  for (const std::string& tenant : query.tenants) {
    MutexLock lock(&s_.mu);
    const auto held = s_.tenants.find(tenant);
    TenantLoad& load = activity.tenants.emplace_back();
    load.queued_requests = s_.scheduler.QueueDepthOf(tenant);
    if (held == s_.tenants.end()) continue;
    load.num_adapters = held->second.count;
    load.adapter_bytes = held->second.bytes;
  }
  return activity;
}

absl::Status AdapterDesk::Report(const MetricReport& report) {
  MutexLock lock(&s_.mu);
  AdapterRecord* const record = s_.Find(report.adapter_id);
  if (record == nullptr) return NoSuchAdapter(report.adapter_id);
  record->history.Add(report, record->info.optim_steps);
  return absl::OkStatus();
}

std::optional<AdapterKey> AdapterDesk::KeyOf(const std::string& id) const {
  MutexLock lock(&s_.mu);
  return s_.KeyOf(id);
}

uint64_t AdapterDesk::Ahead(const std::string& id, uint64_t step) const {
  MutexLock lock(&s_.mu);
  const std::optional<AdapterKey> key = s_.KeyOf(id);
  return key ? s_.scheduler.Ahead(*key, step) : 0;
}

std::string AdapterDesk::NameOf(AdapterKey key) const {
  MutexLock lock(&s_.mu);
  const AdapterRecord* record = s_.Find(key);
  return record == nullptr ? "" : record->info.adapter_id;
}

absl::Status AdapterDesk::CheckReady(const std::string& id) const {
  MutexLock lock(&s_.mu);
  return s_.CheckReady(id);
}

absl::Status AdapterDesk::CheckNew(const std::string& id,
                                   const std::string& tenant) const {
  return CheckNew({{id, tenant}});
}

absl::Status AdapterDesk::CheckNew(
    const std::map<std::string, std::string>& tenants) const {
  MutexLock lock(&s_.mu);
  int before = 0;
  std::map<std::string, int> before_of;
  for (const auto& [id, tenant] : tenants) {
    WEFT_RETURN_IF_ERROR(
        CheckNewAfter(before++, before_of[tenant]++, id, tenant));
  }
  return absl::OkStatus();
}

absl::Status AdapterDesk::CheckNewAfter(int before, int before_of_tenant,
                                        const std::string& id,
                                        const std::string& tenant) const {
  WEFT_RETURN_IF_ERROR(s_.CheckReady(id));
  if (s_.keys.contains(id)) {
    return absl::AlreadyExistsError(
        absl::StrCat("adapter_id: '", id, "' exists"));
  }
  const int num_adapters = static_cast<int>(s_.keys.size()) + before;
  WEFT_RETURN_IF_ERROR(CheckSettled(num_adapters, s_.options.max_adapters,
                                    s_.CountRecovering(nullptr)));
  const auto found = s_.tenants.find(tenant);
  TenantAdapters held =
      found == s_.tenants.end() ? TenantAdapters() : found->second;
  held.count += before_of_tenant;
  if (num_adapters >= s_.options.max_adapters) {
    // Says what the tenant has, and not what the others have. Without tokens
    // each adapter is a tenant.
    return WithReason(
        absl::ResourceExhaustedError(
            tenant == id
                ? absl::StrCat("all ", s_.options.max_adapters,
                               " adapter slots are in use (--max-adapters); "
                               "delete one")
                : absl::StrCat("no adapter slot is left (--max-adapters); "
                               "tenant '",
                               tenant, "' has ", held.count,
                               " of them; delete one")),
        {.name = "ALL_ADAPTER_SLOTS_IN_USE",
         .values = {{"adapters", absl::StrCat(held.count)},
                    {"tenant", tenant}}});
  }
  WEFT_RETURN_IF_ERROR(CheckSettled(held.count,
                                    s_.options.max_adapters_per_tenant,
                                    s_.CountRecovering(&tenant)));
  if (held.count >= s_.options.max_adapters_per_tenant) {
    return WithReason(
        absl::ResourceExhaustedError(absl::StrCat(
            "all ", s_.options.max_adapters_per_tenant,
            " adapter slots of tenant '", tenant,
            "' are in use (--max-adapters-per-tenant); delete one")),
        {.name = "ALL_ADAPTER_SLOTS_IN_USE",
         .values = {{"limit", absl::StrCat(s_.options.max_adapters_per_tenant)},
                    {"tenant", tenant}}});
  }
  return s_.CheckBytes(tenant);
}

absl::Status AdapterDesk::CheckBytes(AdapterKey key) const {
  MutexLock lock(&s_.mu);
  const AdapterRecord* record = s_.Find(key);
  // The replay of the log repeats what was permitted once.
  if (record == nullptr || s_.recovering.contains(record->info.adapter_id)) {
    return absl::OkStatus();
  }
  return s_.CheckBytes(record->info.tenant);
}

AdapterKey AdapterDesk::NewKey() {
  MutexLock lock(&s_.mu);
  return static_cast<AdapterKey>(s_.next_key++);
}

uint64_t AdapterDesk::NewEpoch() {
  MutexLock lock(&s_.mu);
  return s_.NewEpoch();
}

void AdapterDesk::Add(AdapterKey key, const std::string& id,
                      const std::string& tenant, uint64_t last_step,
                      const AdapterFacts& facts) {
  MutexLock lock(&s_.mu);
  const uint64_t epoch = facts.info.epoch;
  AdapterRecord& record =
      s_.AddRecord(key, {.adapter_id = id,
                         .tenant = tenant,
                         .durability = facts.info.durability,
                         .epoch = epoch > 0 ? epoch : s_.NewEpoch(),
                         .last_step = last_step,
                         .last_used_at = absl::Now()});
  s_.SetFacts(record, facts);
  s_.residency.Add(key);
  s_.scheduler.AddAdapter(key, id, tenant, /*last_step=*/0);
  s_.ShowAdapters();
}

void AdapterDesk::AddSampler(AdapterKey key, const std::string& name,
                             const std::string& tenant,
                             const AdapterFacts& facts) {
  MutexLock lock(&s_.mu);
  AdapterRecord& record = s_.AddRecord(key,
                                       {.adapter_id = name,
                                        .tenant = tenant,
                                        .durability = Durability::kMemory,
                                        .epoch = s_.NewEpoch(),
                                        .last_used_at = absl::Now()},
                                       /*hidden=*/true);
  s_.SetFacts(record, facts);
  s_.residency.AddOnDisk(key);
  s_.scheduler.AddAdapter(key, name, tenant, /*last_step=*/0);
  s_.scheduler.SetHeld(key, true);
  s_.ShowAdapters();
}

std::vector<uint64_t> AdapterDesk::Remove(AdapterKey key) {
  std::vector<EngineTask> tasks;
  std::vector<uint64_t> started;
  absl::Status gone;
  {
    MutexLock lock(&s_.mu);
    AdapterRecord* record = s_.Find(key);
    if (record == nullptr) return {};
    gone = absl::NotFoundError(absl::StrCat(
        "adapter_id: '", record->info.adapter_id, "' was deleted"));
    tasks = s_.TakeTasks(key);
    s_.RemoveRecord(key);
    s_.residency.Remove(key);
    for (const uint64_t id : s_.scheduler.RemoveAdapter(key)) {
      const auto step = s_.steps.find(id);
      if (step != s_.steps.end() && step->second->started)
        started.push_back(id);
      s_.Drop(id, gone);
    }
    s_.ShowAdapters();
  }
  for (const EngineTask& task : tasks) task(gone);
  return started;
}

void AdapterDesk::Publish(AdapterKey key, const AdapterFacts& facts) {
  MutexLock lock(&s_.mu);
  AdapterRecord* record = s_.Find(key);
  if (record == nullptr) return;
  s_.SetFacts(*record, facts);
}

void AdapterDesk::WhenOnDevice(AdapterKey key, EngineTask task) {
  {
    MutexLock lock(&s_.mu);
    AdapterRecord* record = s_.Find(key);
    if (record != nullptr && !s_.residency.CanRun(key)) {
      record->tasks.push_back(KeepTrace(std::move(task)));
      s_.WantAdapter(key);
      return;
    }
    s_.residency.Used(key, kTask);
  }
  task(absl::OkStatus());
}

void AdapterDesk::WhenSlot(EngineTask task) {
  MutexLock lock(&s_.mu);
  const uint64_t ticket = s_.next_id++;
  s_.slot_tasks.emplace(ticket, KeepTrace(std::move(task)));
  s_.residency.WantSlot(ticket);
}

void AdapterDesk::WhenSlotFor(const std::string& id, const std::string& tenant,
                              EngineTask task) {
  const absl::Status status = CheckNew(id, tenant);
  if (status.ok()) {
    WhenSlot(std::move(task));
  } else {
    task(status);
  }
}

Callback<AdapterInfo> AdapterDesk::AnswerRepeats(
    const CreateAdapterRequest& request, Callback<AdapterInfo> done) const {
  return [this, request,
          done = std::move(done)](absl::StatusOr<AdapterInfo> info) {
    if (absl::IsAlreadyExists(info.status())) {
      absl::StatusOr<AdapterInfo> existing = Info(request.adapter_id);
      if (existing.ok() && existing->tenant == request.tenant &&
          existing->config == request.config &&
          existing->durability == request.durability &&
          existing->last_step == 0 && existing->version == 1) {
        info = std::move(existing);
      }
    }
    done(std::move(info));
  };
}

void AdapterDesk::ReturnSlot() {
  MutexLock lock(&s_.mu);
  s_.residency.ReturnSlot();
}

bool AdapterDesk::IsUnderway(const Move& move) const {
  MutexLock lock(&s_.mu);
  return s_.residency.IsUnderway(move);
}

void AdapterDesk::FinishMove(const Move& move, uint64_t bytes,
                             const absl::Status& status) {
  std::vector<EngineTask> ready;
  std::vector<EngineTask> failed;
  absl::Status error;
  {
    MutexLock lock(&s_.mu);
    s_.env.metrics->CountMove(move.from, move.to, status.ok(), bytes);
    const std::optional<SlotWaiter> unserved =
        s_.residency.Finished(move, status.ok());
    AdapterRecord* record = s_.Find(move.adapter);
    if (unserved) {
      // What keeps a checkpoint from being read is about the checkpoint.
      error = record != nullptr && record->hidden &&
                      move.to == AdapterLocation::kDevice
                  ? status
                  : MoveFailed(move,
                               record == nullptr ? "" : record->info.adapter_id,
                               status);
      failed = DropWaiter(*unserved, error);
    }
    if (record != nullptr && s_.residency.CanRun(move.adapter)) {
      s_.scheduler.SetHeld(move.adapter, false);
      ready = s_.TakeTasks(move.adapter);
      if (status.ok() && record->wanted_at) {
        s_.env.metrics->ObserveSwapIn(s_.env.clock->Now() - *record->wanted_at);
      }
      record->wanted_at.reset();
    }
    s_.ShowAdapters();
  }
  for (const EngineTask& task : failed) task(error);
  for (const EngineTask& task : ready) task(absl::OkStatus());
}

void AdapterDesk::PostponeMove(const Move& move) {
  MutexLock lock(&s_.mu);
  s_.residency.Postpone(move);
}

void AdapterDesk::ResumeMove(AdapterKey key) {
  MutexLock lock(&s_.mu);
  s_.residency.Resume(key);
}

std::vector<EngineTask> AdapterDesk::DropWaiter(const SlotWaiter& waiter,
                                                const absl::Status& status) {
  if (waiter.ticket > 0) {
    return {std::move(s_.slot_tasks.extract(waiter.ticket).mapped())};
  }
  for (const uint64_t id : s_.scheduler.WaitingOf(waiter.adapter)) {
    s_.Withdraw(id, status);
  }
  return s_.TakeTasks(waiter.adapter);
}

}  // namespace weft::dispatch
