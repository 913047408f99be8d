#include "src/dispatch/recovery_desk.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "src/base/observe/log.h"
#include "src/base/status_macros.h"

namespace weft::dispatch {
namespace {

// Returns whether the step is one of the adapter, or one that it teaches.
bool Needs(const StepWork& work, std::optional<AdapterKey> key,
           const std::string& adapter_id) {
  const auto* const train = std::get_if<TrainRequest>(&work.request);
  return work.adapter == key ||
         (train != nullptr && train->loss.teacher.adapter_id == adapter_id);
}

}  // namespace

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
  s_.held_ids.erase(adapter_id);
  s_.ShowAdapters();
}

absl::Status RecoveryDesk::Hold(const std::string& adapter_id,
                                const std::string& tenant) {
  MutexLock lock(&s_.mu);
  if (const AdapterRecord* const record = s_.Find(adapter_id)) {
    WEFT_RETURN_IF_ERROR(record->stopped);
  }
  s_.recovering.emplace(adapter_id, tenant);
  s_.held_ids.insert(adapter_id);
  s_.ShowAdapters();
  const std::optional<AdapterKey> key = s_.KeyOf(adapter_id);
  std::vector<uint64_t> behind_gaps;
  for (const auto& [id, work] : s_.steps) {
    if (Needs(*work, key, adapter_id) && work->step > 0 && !work->note &&
        s_.scheduler.Ahead(work->adapter, work->step) > 0 &&
        s_.scheduler.Remove(id)) {
      behind_gaps.push_back(id);
    }
  }
  for (const uint64_t id : behind_gaps) {
    s_.Drop(id, s_.CheckReady(adapter_id));
  }
  return absl::OkStatus();
}

bool RecoveryDesk::IsQuiet(AdapterKey key) const {
  MutexLock lock(&s_.mu);
  const AdapterRecord* const record = s_.Find(key);
  if (record == nullptr || !record->tasks.empty()) return false;
  const auto has_step = [&](const auto& entry) {
    return Needs(*entry.second, key, record->info.adapter_id);
  };
  return std::ranges::none_of(s_.steps, has_step) &&
         std::ranges::none_of(s_.samples, [key](const auto& entry) {
           return entry.second->adapter == key;
         });
}

std::vector<uint64_t> RecoveryDesk::DropSamples(AdapterKey key) {
  MutexLock lock(&s_.mu);
  const AdapterRecord* const record = s_.Find(key);
  std::vector<uint64_t> ids;
  for (const auto& [id, work] : s_.samples) {
    if (work->adapter == key) ids.push_back(id);
  }
  std::erase_if(ids, [&](uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu) {
    return s_.Withdraw(id, s_.CheckReady(record->info.adapter_id));
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
