#include "src/dispatch/step_desk.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::dispatch {
namespace {

using Verdict = ReplayTable::Verdict;

absl::Status StaleEpoch(uint64_t epoch, const AdapterRecord& record) {
  const AdapterInfo& info = record.info;
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "epoch: ", epoch, " of adapter '", info.adapter_id,
          "' has ended, the present one is ", info.epoch,
          "; its state is durable up to step ", info.durable_step)),
      {.name = "STALE_EPOCH",
       .values = {{"adapter", info.adapter_id},
                  {"epoch", absl::StrCat(info.epoch)},
                  {"durable_step", absl::StrCat(info.durable_step)}}});
}

absl::StatusOr<StepResultPtr> Share(absl::StatusOr<StepResult> result) {
  if (!result.ok()) return result.status();
  return std::make_shared<const StepResult>(*std::move(result));
}

absl::Status Cancelled() {
  return absl::CancelledError("cancelled by the client");
}

void RaiseDurableStep(AdapterRecord& record, uint64_t step) {
  uint64_t& durable = record.info.durable_step;
  durable = std::max(durable, step);
}

}  // namespace

CancelHandle StepDesk::Submit(StepRequest request, sched::WorkItem item,
                              StepCallback done) {
  // The digest takes time linear in the request's bytes, so it is computed
  // without the lock.
  std::string digest = PayloadDigest(request);
  absl::StatusOr<CancelHandle> handle =
      Accept(request, std::move(item), std::move(digest), done);
  if (!handle.ok()) {
    done(handle.status(), false);
    return {};
  }
  s_.changed.NotifyAll();
  return *std::move(handle);
}

absl::StatusOr<std::optional<CancelHandle>> StepDesk::Repeated(
    AdapterRecord& record, const StepRequest& request,
    const std::string& digest, const StepCallback& done) {
  const uint64_t step = StepOf(request);
  const auto replay = [&](StepResultPtr result) {
    s_.env.post_durable([done, result = std::move(result)] {
      done(result, /*replayed=*/true);
    });
    return std::make_optional<CancelHandle>();
  };
  const std::optional<LoadOrigin>& origin = record.origin;
  if (origin && step != 0 && origin->step == step && origin->digest == digest) {
    return replay(origin->result);
  }
  const uint64_t epoch = EpochOf(request);
  if (epoch != 0 && epoch != record.info.epoch)
    return StaleEpoch(epoch, record);
  WEFT_ASSIGN_OR_RETURN(ReplayTable::Answer answer,
                        record.replays.Lookup(step, digest));
  if (answer.verdict == Verdict::kReplay) {
    return replay(std::move(answer.result));
  }
  if (answer.verdict == Verdict::kNew) return std::nullopt;
  StepWork& work = *s_.steps.at(answer.work_id);
  if (std::exchange(work.cancelled, false)) {
    // All earlier callers have cancelled. Answers and removes them, so that
    // only the new caller is left. If the new caller cancels too, the step ends
    // early.
    for (StepWork::Waiter& waiter : std::exchange(work.waiters, {})) {
      AnswerCancelled(std::move(waiter.done));
    }
  }
  const uint64_t waiter_id = s_.next_id++;
  work.waiters.push_back({.id = waiter_id, .done = done, .repeated = true});
  return CancelHandle(
      [this, id = answer.work_id, waiter_id] { Cancel(id, waiter_id); });
}

absl::StatusOr<CancelHandle> StepDesk::Accept(StepRequest& request,
                                              sched::WorkItem item,
                                              std::string digest,
                                              const StepCallback& done) {
  MutexLock lock(&s_.mu);
  const std::string& adapter_id = AdapterIdOf(request);
  item.step = StepOf(request);
  item.deadline = DeadlineOf(request);
  const std::optional<AdapterKey> key = s_.KeyOf(adapter_id);
  AdapterRecord* record = key ? s_.Find(*key) : nullptr;
  if (record != nullptr) {
    WEFT_ASSIGN_OR_RETURN(std::optional<CancelHandle> repeated,
                          Repeated(*record, request, digest, done));
    if (repeated) return *std::move(repeated);
  }
  WEFT_RETURN_IF_ERROR(s_.CheckOpen());
  if (!key) return NoSuchAdapter(adapter_id);
  item.recorded = s_.options.records_steps && record != nullptr &&
                  record->info.durability == Durability::kStep;
  // A repeated call needs no room in the log, so Repeated comes before this
  // check.
  if (item.recorded && s_.env.check_room) {
    WEFT_RETURN_IF_ERROR(s_.env.check_room());
  }
  const uint64_t id = s_.next_id++;
  const uint64_t waiter_id = s_.next_id++;
  item.id = id;
  item.adapter = *key;
  const sched::WorkKind kind = item.kind;
  WEFT_ASSIGN_OR_RETURN(const uint64_t step, s_.Enqueue(std::move(item)));
  s_.WantAdapter(*key);
  const absl::Time now = s_.env.clock->Now();
  if (record != nullptr) {
    record->replays.Begin(step, digest, id);
    record->info.last_used_at = absl::Now();
  }
  auto work = std::make_unique<StepWork>();
  work->request = std::move(request);
  work->adapter = *key;
  work->digest = std::move(digest);
  work->step = step;
  work->kind = kind;
  work->accepted_at = now;
  work->waiters.push_back({.id = waiter_id, .done = done});
  s_.steps.emplace(id, std::move(work));
  return CancelHandle([this, id, waiter_id] { Cancel(id, waiter_id); });
}

void StepDesk::Cancel(uint64_t id, uint64_t waiter_id) {
  MutexLock lock(&s_.mu);
  const auto it = s_.steps.find(id);
  if (it == s_.steps.end()) return;
  StepWork& work = *it->second;
  const auto waiter =
      std::ranges::find(work.waiters, waiter_id, &StepWork::Waiter::id);
  if (waiter == work.waiters.end()) return;
  if (work.waiters.size() == 1) {
    work.cancelled = true;
    if (s_.scheduler.Cancel(id)) s_.Drop(id, Cancelled());
    // Work that waited for this step may now run, and a drain may end.
    s_.changed.NotifyAll();
    return;
  }
  AnswerCancelled(std::move(waiter->done));
  work.waiters.erase(waiter);
}

void StepDesk::AnswerCancelled(StepCallback done) {
  s_.env.post_reply([done = std::move(done)] { done(Cancelled(), false); });
}

void StepDesk::Complete(uint64_t id, absl::StatusOr<StepResult> result,
                        const std::optional<AdapterFacts>& facts) {
  StepNode ended;
  MutexLock lock(&s_.mu);
  const auto work = s_.steps.find(id);
  if (work == s_.steps.end()) {
    s_.scheduler.Finished(id, result.ok());
    return;
  }
  AdapterRecord* record = s_.Find(work->second->adapter);
  if (facts && record != nullptr) s_.SetFacts(*record, *facts);
  if (!result.ok() && IsStepFailure(work->second->request, result.status())) {
    result = StepFailure{.status = result.status()};
  }
  ended = End(id, Share(std::move(result)));
}

StepDesk::StepNode StepDesk::End(uint64_t id,
                                 absl::StatusOr<StepResultPtr> result) {
  s_.scheduler.Finished(id, result.ok());
  StepNode node = s_.steps.extract(id);
  if (node.empty()) return node;
  StepWork& work = *node.mapped();
  if (AdapterRecord* record = s_.Find(work.adapter)) {
    s_.residency.Used(work.adapter, sched::kTraining);
    if (result.ok()) {
      // A checkpoint of kind kSampler has weights only, so it makes no step
      // durable.
      const auto* saved = std::get_if<CheckpointInfo>(result->get());
      if (saved != nullptr && saved->kind == CheckpointKind::kTrain) {
        RaiseDurableStep(*record, saved->last_step);
      }
      if (work.again && work.step > 0) {
        s_.scheduler.SetLastStep(work.adapter, work.step);
      }
      if (const auto* trained = std::get_if<TrainResult>(result->get())) {
        record->history.Add(std::get<TrainRequest>(work.request), *trained,
                            s_.env.clock->Now());
      }
      s_.StoreReply(*record, work.adapter, work.step, *result);
    } else {
      record->replays.Fail(work.step);
    }
  }
  Answer(work, std::move(result));
  return node;
}

void StepDesk::NoteDurable(AdapterKey adapter, uint64_t epoch, uint64_t step) {
  MutexLock lock(&s_.mu);
  AdapterRecord* record = s_.Find(adapter);
  if (record == nullptr || record->info.epoch != epoch) return;
  RaiseDurableStep(*record, step);
}

void StepDesk::Answer(StepWork& work, absl::StatusOr<StepResultPtr> result) {
  const AdapterRecord* record = s_.Find(work.adapter);
  const bool recorded = s_.options.records_steps && record != nullptr &&
                        record->info.durability == Durability::kStep &&
                        result.ok();
  s_.env.post_durable([this, recorded, adapter = work.adapter,
                       epoch = recorded ? record->info.epoch : 0,
                       step = work.step, waiters = std::move(work.waiters),
                       result = std::move(result)] {
    if (recorded) NoteDurable(adapter, epoch, step);
    for (const StepWork::Waiter& waiter : waiters) {
      waiter.done(result, /*replayed=*/waiter.repeated);
    }
  });
}

bool StepDesk::FinishSlice(uint64_t id) {
  StepNode ended;
  MutexLock lock(&s_.mu);
  if (!s_.steps.at(id)->cancelled) {
    s_.scheduler.Finished(id, /*ok=*/true);
    return true;
  }
  ended = End(id, Cancelled());
  return false;
}

void StepDesk::CompleteLoad(const StepTask& load, uint64_t last_step,
                            const AdapterFacts& facts) {
  StepNode ended;
  MutexLock lock(&s_.mu);
  AdapterRecord* record = s_.Find(load.adapter);
  if (record == nullptr) {
    ended = End(load.id, NoSuchAdapter(AdapterIdOf(*load.request)));
    return;
  }
  s_.SetFacts(*record, facts);
  const uint64_t epoch = facts.info.epoch;
  record->info.epoch = epoch > 0 ? epoch : s_.NewEpoch();
  record->info.durable_step = last_step;
  RestartNumbers(load, last_step, *record);
  s_.scheduler.Finished(load.id, /*ok=*/true);
  s_.residency.Used(load.adapter, sched::kTraining);
  const auto result =
      std::make_shared<const StepResult>(s_.InfoOf(load.adapter));
  record->origin =
      LoadOrigin{.step = load.step, .digest = *load.digest, .result = result};
  ended = s_.steps.extract(load.id);
  if (!ended.empty()) Answer(*ended.mapped(), result);
}

void StepDesk::RestartNumbers(const StepTask& load, uint64_t last_step,
                              AdapterRecord& record) {
  const sched::AdapterQueue::StepChange changed =
      s_.scheduler.SetLastStep(load.adapter, last_step);
  for (const uint64_t id : changed.dropped) {
    s_.Drop(id, absl::FailedPreconditionError(absl::StrCat(
                    "step: a checkpoint was loaded, the next number is ",
                    last_step + 1)));
  }
  for (const auto& [id, step] : changed.renumbered) {
    s_.steps.at(id)->step = step;
  }
  s_.ForgetReplies(record);
  record.replays = ReplayTable();
  for (const auto& [id, work] : s_.steps) {
    if (work->adapter == load.adapter && id != load.id) {
      record.replays.Begin(work->step, work->digest, id);
    }
  }
}

void StepDesk::CountTokens(const RunTrain& train) {
  MutexLock lock(&s_.mu);
  for (size_t i = 0; i < train.slices.size(); ++i) {
    const sched::TrainSlice& slice = train.slices[i];
    const auto& request = std::get<TrainRequest>(*train.steps[i].request);
    int64_t num_tokens = 0;
    for (int64_t d = 0; d < slice.num_data; ++d) {
      num_tokens += request.data[slice.first_datum + d].num_tokens();
    }
    const AdapterKey adapter = train.steps[i].adapter;
    s_.env.metrics->CountTenantTrain(s_.scheduler.TenantOf(adapter),
                                     num_tokens);
    if (AdapterRecord* record = s_.Find(adapter)) {
      record->history.CountTrained(num_tokens);
    }
  }
}

}  // namespace weft::dispatch
