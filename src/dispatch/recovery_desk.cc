#include "src/dispatch/recovery_desk.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/request/move_unit.h"

namespace weft::dispatch {
void RecoveryDesk::Reserve(uint64_t next_key, uint64_t last_epoch,
                           uint64_t next_work) {
  MutexLock lock(&s_.mu);
  s_.next_id = std::max(s_.next_id, next_work);
  s_.next_key = std::max(s_.next_key, next_key);
  s_.last_epoch = std::max(s_.last_epoch, last_epoch);
}

uint64_t RecoveryDesk::next_key() const {
  MutexLock lock(&s_.mu);
  return s_.next_key;
}

uint64_t RecoveryDesk::last_epoch() const {
  MutexLock lock(&s_.mu);
  return s_.last_epoch;
}

void RecoveryDesk::SetRecovering(std::map<std::string, std::string> tenants) {
  MutexLock lock(&s_.mu);
  s_.recovering = std::move(tenants);
  s_.ShowAdapters();
}

void RecoveryDesk::SetReady(const std::string& adapter_id) {
  MutexLock lock(&s_.mu);
  s_.recovering.erase(adapter_id);
  s_.ShowAdapters();
}

bool RecoveryDesk::IsIn(const std::string& unit, AdapterKey key) const {
  const AdapterRecord* const record = s_.Find(key);
  return record != nullptr && !record->hidden &&
         UnitOf(record->info.adapter_id) == unit;
}

bool RecoveryDesk::Needs(const StepWork& work, const std::string& unit) const {
  const auto* const train = std::get_if<TrainRequest>(&work.request);
  return IsIn(unit, work.adapter) ||
         (train != nullptr && UnitOf(train->loss.teacher.adapter_id) == unit);
}

absl::Status RecoveryDesk::Hold(
    const std::string& unit,
    const std::map<std::string, std::string>& tenants) {
  MutexLock lock(&s_.mu);
  for (const auto& [key, record] : s_.adapters) {
    if (IsIn(unit, key)) WEFT_RETURN_IF_ERROR(record.stopped);
  }
  std::vector<uint64_t> behind_gaps;
  for (const auto& [id, work] : s_.steps) {
    if (!Needs(*work, unit) || work->step == 0 ||
        s_.scheduler.Ahead(work->adapter, work->step) == 0) {
      continue;
    }
    if (work->note) {
      return absl::UnavailableError(absl::StrCat(
          "an accepted step of '", unit,
          "' waits for earlier ones, which have not come: try again"));
    }
    behind_gaps.push_back(id);
  }
  s_.recovering.insert(tenants.begin(), tenants.end());
  s_.held_units.insert(unit);
  s_.ShowAdapters();
  for (const uint64_t id : behind_gaps) {
    if (s_.scheduler.Remove(id)) s_.Drop(id, s_.CheckReady(unit));
  }
  return absl::OkStatus();
}

void RecoveryDesk::Release(const std::string& unit) {
  MutexLock lock(&s_.mu);
  std::erase_if(s_.recovering, [&unit](const auto& adapter) {
    return UnitOf(adapter.first) == unit;
  });
  s_.held_units.erase(unit);
  s_.ShowAdapters();
}

std::map<AdapterKey, AdapterInfo> RecoveryDesk::AdaptersOf(
    const std::string& unit) const {
  MutexLock lock(&s_.mu);
  std::map<AdapterKey, AdapterInfo> adapters;
  for (const auto& [key, record] : s_.adapters) {
    if (IsIn(unit, key)) adapters.emplace(key, s_.InfoOf(key));
  }
  return adapters;
}

bool RecoveryDesk::IsQuiet(const std::string& unit) const {
  MutexLock lock(&s_.mu);
  const auto has_task =
      [&](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu) {
        return !entry.second.tasks.empty() && IsIn(unit, entry.first);
      };
  const auto has_step = [&](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(
                            s_.mu) { return Needs(*entry.second, unit); };
  const auto has_sample = [&](const auto& entry)
                              ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu) {
                                return IsIn(unit, entry.second->adapter);
                              };
  return std::ranges::none_of(s_.adapters, has_task) &&
         std::ranges::none_of(s_.steps, has_step) &&
         std::ranges::none_of(s_.samples, has_sample);
}

std::vector<uint64_t> RecoveryDesk::DropSamples(const std::string& unit) {
  MutexLock lock(&s_.mu);
  std::vector<uint64_t> ids;
  for (const auto& [id, work] : s_.samples) {
    if (IsIn(unit, work->adapter)) ids.push_back(id);
  }
  std::erase_if(ids, [&](uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu) {
    return s_.Withdraw(id, s_.CheckReady(unit));
  });
  return ids;
}

void RecoveryDesk::SetTimeLeft(absl::Duration left) {
  s_.env.metrics->SetRecoveryTimeLeft(left);
}

void RecoveryDesk::Post(EngineTask task) {
  absl::Status closed;
  {
    MutexLock lock(&s_.mu);
    closed = s_.closed;
    if (closed.ok()) s_.replay = std::move(task);
  }
  if (!closed.ok()) {
    task(closed);  // NOLINT(bugprone-use-after-move): moved only while open.
  }
}

void RecoveryDesk::AddOnDisk(AdapterKey key, const AdapterHistory& history,
                             const AdapterFacts& facts) {
  const AdapterInfo& info = history.info;
  const uint64_t last_step = info.next_step - 1;
  MutexLock lock(&s_.mu);
  AdapterRecord& record = s_.AddRecord(key, info);
  s_.SetFacts(record, facts);
  s_.residency.AddOnDisk(key);
  s_.scheduler.AddAdapter(key, info.adapter_id, info.tenant, last_step);
  s_.scheduler.SetHeld(key, true);
  record.replays.Forget(
      history.replies.empty() ? last_step : history.replies.front().step - 1);
  s_.ShowAdapters();
  for (const StoredReply& reply : history.replies) Store(record, key, reply);
}

void RecoveryDesk::Pin(AdapterKey key, bool pinned) {
  MutexLock lock(&s_.mu);
  if (AdapterRecord* record = s_.Find(key)) record->pinned = pinned;
}

StepTask RecoveryDesk::BeginStep(AdapterKey key, uint64_t step,
                                 std::string digest, StepRequest request) {
  MutexLock lock(&s_.mu);
  const uint64_t id = s_.next_id++;
  if (AdapterRecord* record = s_.Find(key)) {
    record->replays.Begin(step, digest, id);
  }
  auto work = std::make_unique<StepWork>();
  work->request = std::move(request);
  if (auto* const train = std::get_if<TrainRequest>(&work->request)) {
    train->again = true;
  }
  work->adapter = key;
  work->digest = std::move(digest);
  work->step = step;
  work->accepted_at = s_.env.clock->Now();
  work->again = true;
  s_.steps.emplace(id, std::move(work));
  return s_.StartStep(id);
}

void RecoveryDesk::AbandonStep(uint64_t id) {
  MutexLock lock(&s_.mu);
  const auto node = s_.steps.extract(id);
  if (node.empty()) return;
  if (AdapterRecord* record = s_.Find(node.mapped()->adapter)) {
    record->replays.Fail(node.mapped()->step);
  }
}

void RecoveryDesk::Store(AdapterRecord& record, AdapterKey key,
                         const StoredReply& reply) {
  record.replays.Begin(reply.step, reply.digest, 0);
  s_.StoreReply(record, key, reply.step, reply.result);
  record.info.durable_step = std::max(record.info.durable_step, reply.step);
}

void RecoveryDesk::AddReply(AdapterKey key, const StoredReply& reply) {
  MutexLock lock(&s_.mu);
  AdapterRecord* record = s_.Find(key);
  if (record == nullptr || reply.step == 0) return;
  Store(*record, key, reply);
  ++record->info.last_step;
  s_.scheduler.SkipTo(key, reply.step);
}

void RecoveryDesk::Resume(AdapterKey key, uint64_t id, std::string digest,
                          StepRequest request, std::string note,
                          WorkItem item) {
  item.id = id;
  item.step = StepOf(request);
  auto work = std::make_unique<StepWork>();
  work->request = std::move(request);
  work->adapter = key;
  work->digest = std::move(digest);
  work->note = std::move(note);
  MutexLock lock(&s_.mu);
  const absl::Status queued = s_.Queue(std::move(work), std::move(item));
  if (queued.ok()) return;
  Log(LogLevel::kError, "an accepted step cannot run again",
      {{"error", std::string(queued.message())}});
}

std::vector<AcceptedStep> RecoveryDesk::Kept() const {
  MutexLock lock(&s_.mu);
  std::vector<AcceptedStep> kept;
  for (const auto& [id, work] : s_.steps) {
    if (!work->note || !s_.IsRecorded(s_.Find(work->adapter))) continue;
    AcceptedStep& step = kept.emplace_back(AcceptedStep{.work = id,
                                                        .key = work->adapter,
                                                        .step = work->step,
                                                        .digest = work->digest,
                                                        .note = *work->note});
    if (const auto* refused = std::get_if<RefusedStep>(&work->request)) {
      step.refused = StepFailure{.status = refused->status};
    } else {
      step.request = work->request;
    }
  }
  return kept;
}

std::vector<AdapterKey> RecoveryDesk::Keys() const {
  MutexLock lock(&s_.mu);
  std::vector<AdapterKey> keys;
  for (const auto& [key, record] : s_.adapters) keys.push_back(key);
  return keys;
}

AdapterHistory RecoveryDesk::HistoryOf(AdapterKey key) const {
  MutexLock lock(&s_.mu);
  const AdapterRecord& record = s_.adapters.at(key);
  AdapterHistory history{.info = record.info, .replies = {}};
  history.info.next_step = s_.scheduler.LastStep(key) + 1;
  for (const auto& [step, done] : record.replays.done()) {
    if (done.result == nullptr) continue;
    history.replies.push_back(
        {.step = step, .digest = done.digest, .result = done.result});
  }
  return history;
}

bool RecoveryDesk::FinishSlices(bool wanted) {
  MutexLock lock(&s_.mu);
  const bool between =
      wanted && std::ranges::any_of(s_.steps, [](const auto& entry) {
        return entry.second->started && entry.second->kind == WorkKind::kTrain;
      });
  s_.scheduler.SetUndividedOnly(between);
  return wanted && !between;
}

}  // namespace weft::dispatch
