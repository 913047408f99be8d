#include "src/dispatch/step_desk.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::dispatch {
namespace {

using Verdict = ReplayTable::Verdict;

absl::Status StaleEpoch(uint64_t epoch, const AdapterRecord& record) {
  const AdapterInfo& info = record.info;
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "epoch: adapter '", info.adapter_id, "' of epoch ", epoch,
          " is gone; the present adapter of this name has epoch ", info.epoch)),
      {.name = "STALE_EPOCH",
       .values = {{"adapter", info.adapter_id},
                  {"epoch", absl::StrCat(info.epoch)}}});
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

// Returns UNAVAILABLE if a new step would run without the values that it takes
// from records of samples.
absl::Status CheckHasValues(const StepRequest& request) {
  const auto* const train = std::get_if<TrainRequest>(&request);
  if (train == nullptr || train->replay.spans.empty()) return absl::OkStatus();
  return absl::UnavailableError(
      "the step that this call repeats has ended without a result: repeat the "
      "call");
}

}  // namespace

CancelHandle StepDesk::Submit(StepRequest request, WorkItem item,
                              StepCallback done, Keeping keep) {
  // The digest takes time linear in the request's bytes, so it is computed
  // without the lock.
  std::string digest = PayloadDigest(request);
  absl::StatusOr<CancelHandle> handle =
      Accept(request, std::move(item), std::move(digest), done, keep);
  if (!handle.ok()) {
    done(handle.status(), false);
    return {};
  }
  s_.changed.NotifyAll();
  return *std::move(handle);
}

bool StepDesk::Knows(const std::string& adapter_id, uint64_t step,
                     const std::string& digest) {
  MutexLock lock(&s_.mu);
  const std::optional<AdapterKey> key = s_.KeyOf(adapter_id);
  const AdapterRecord* const record = key ? s_.Find(*key) : nullptr;
  if (record == nullptr) return false;
  const auto answer = record->replays.Lookup(step, digest);
  return !answer.ok() || answer->verdict != Verdict::kNew;
}

void StepDesk::Retrieve(const std::string& adapter_id, uint64_t step,
                        Callback<StepResultPtr> done) {
  MutexLock lock(&s_.mu);
  const std::optional<AdapterKey> key = s_.KeyOf(adapter_id);
  const AdapterRecord* const record = key ? s_.Find(*key) : nullptr;
  absl::StatusOr<StepResultPtr> result = NoSuchAdapter(adapter_id);
  if (record != nullptr) {
    if (const auto id = record->replays.WorkOf(step)) {
      s_.steps.at(*id)->waiters.push_back(
          {.id = s_.next_id++,
           .done = [done = std::move(done)](absl::StatusOr<StepResultPtr> ended,
                                            bool) { done(std::move(ended)); },
           .repeated = true});
      return;
    }
    result = record->replays.ResultOf(step);
  }
  if (result.ok() && *result == nullptr) {
    result = absl::OutOfRangeError(
        absl::StrCat("step ", step, " has no result, or it is no longer kept"));
  }
  s_.env.post_durable(
      [done = std::move(done), result = std::move(result)] { done(result); });
}

absl::StatusOr<std::optional<CancelHandle>> StepDesk::Repeated(
    AdapterRecord& record, const StepRequest& request,
    const std::string& digest, const StepCallback& done,
    const std::function<void()>& kept) {
  const uint64_t step = StepOf(request);
  const auto replay = [&](StepResultPtr result) {
    s_.env.post_durable([done, result = std::move(result)] {
      done(result, /*replayed=*/true);
    });
    return std::make_optional<CancelHandle>();
  };
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
  const uint64_t waiter_id = s_.next_id++;
  work.waiters.push_back({.id = waiter_id, .done = done, .repeated = true});
  if (kept && work.note) s_.env.post_durable(kept);
  return CancelHandle(
      [this, id = answer.work_id, waiter_id] { Cancel(id, waiter_id); });
}

bool StepDesk::IsTakenByDrain(const StepRequest& request,
                              std::optional<AdapterKey> key) const {
  if (!key || !std::holds_alternative<SaveCheckpointRequest>(request)) {
    return false;
  }
  const uint64_t step = StepOf(request);
  return step == 0 ? s_.scheduler.WaitingOf(*key).empty()
                   : step == s_.scheduler.NextStep(*key);
}

absl::StatusOr<CancelHandle> StepDesk::Accept(StepRequest& request,
                                              WorkItem item, std::string digest,
                                              const StepCallback& done,
                                              const Keeping& keep) {
  MutexLock lock(&s_.mu);
  const std::string& adapter_id = AdapterIdOf(request);
  // Again, because the adapter may be held by now.
  WEFT_RETURN_IF_ERROR(s_.CheckReady(adapter_id));
  if (const auto* const train = std::get_if<TrainRequest>(&request)) {
    WEFT_RETURN_IF_ERROR(s_.CheckReady(train->loss.teacher.adapter_id));
  }
  item.step = StepOf(request);
  item.deadline = DeadlineOf(request);
  const std::optional<AdapterKey> key = s_.KeyOf(adapter_id);
  AdapterRecord* record = key ? s_.Find(*key) : nullptr;
  if (record != nullptr) {
    WEFT_ASSIGN_OR_RETURN(
        std::optional<CancelHandle> repeated,
        Repeated(*record, request, digest, done, keep.step.kept));
    if (repeated) return *std::move(repeated);
  }
  WEFT_RETURN_IF_ERROR(CheckHasValues(request));
  if (s_.finishing || s_.stopping || !IsTakenByDrain(request, key)) {
    WEFT_RETURN_IF_ERROR(s_.CheckOpen());
  }
  if (!key) return NoSuchAdapter(adapter_id);
  if (record != nullptr) WEFT_RETURN_IF_ERROR(record->stopped);
  const bool recorded = s_.IsRecorded(record);
  // A repeated call needs no room in the log, so Repeated comes before this
  // check.
  if (recorded && s_.env.check_room) {
    WEFT_RETURN_IF_ERROR(s_.env.check_room());
  }
  const uint64_t id = s_.next_id++;
  const uint64_t waiter_id = s_.next_id++;
  item.id = id;
  auto work = std::make_unique<StepWork>();
  work->request = std::move(request);
  work->adapter = *key;
  work->digest = std::move(digest);
  work->late = s_.draining;
  work->waiters.push_back({.id = waiter_id, .done = done});
  if (keep.step.kept) work->note = keep.step.note;
  WEFT_RETURN_IF_ERROR(s_.Queue(std::move(work), std::move(item)));
  // The engine thread cannot begin the step before the lock is released, so the
  // log has the request before it has what becomes of it.
  if (keep.step.kept && recorded) keep.record(id, *key);
  if (keep.step.kept) s_.env.post_durable(keep.step.kept);
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
  // An accepted step runs without its callers, because a broken connection
  // looks like a cancellation, and then the call is repeated.
  if (work.waiters.size() == 1 && !work.note && s_.scheduler.Remove(id)) {
    s_.Drop(id, Cancelled());
    // Work that waited for this step may now run, and a drain may end.
    s_.changed.NotifyAll();
    return;
  }
  s_.env.post_reply(
      [done = std::move(waiter->done)] { done(Cancelled(), false); });
  work.waiters.erase(waiter);
}

void StepDesk::Complete(uint64_t id, absl::StatusOr<StepResult> result,
                        const std::optional<AdapterFacts>& facts) {
  StepNode ended;
  MutexLock lock(&s_.mu);
  // A request that fails in one of its slices has no more slices. So this comes
  // before a failure becomes a result.
  s_.scheduler.Finished(id, result.ok());
  const auto work = s_.steps.find(id);
  if (work == s_.steps.end()) return;
  AdapterRecord* record = s_.Find(work->second->adapter);
  if (facts && record != nullptr) s_.SetFacts(*record, *facts);
  if (record != nullptr && work->second->step > 0) {
    result = StoredResult(std::move(result));
    if (!result.ok()) StopLine(*record, *work->second, result.status());
  }
  if (record != nullptr && result.ok()) {
    if (auto* const info = std::get_if<AdapterInfo>(&*result)) {
      NoteLoad(*record, *work->second, info);
    }
  }
  ended = End(id, Share(std::move(result)));
}

void StepDesk::StopLine(AdapterRecord& record, const StepWork& lost,
                        const absl::Status& status) {
  record.stopped = status;
  for (const uint64_t id : s_.scheduler.RemoveAdapter(lost.adapter)) {
    const auto work = s_.steps.find(id);
    if (work == s_.steps.end() || work->second.get() != &lost) {
      s_.Drop(id, status);
    }
  }
}

void StepDesk::NoteLoad(AdapterRecord& record, const StepWork& work,
                        AdapterInfo* info) {
  if (work.again) s_.scheduler.SkipTo(work.adapter, work.step);
  record.info.last_step = info->last_step;
  RaiseDurableStep(record, work.step);
  *info = s_.InfoOf(work.adapter);
}

void StepDesk::NoteResult(AdapterRecord& record, const StepWork& work,
                          const StepResult& result) {
  // NoteLoad has set the steps of a state that was loaded.
  if (work.step > 0 && !std::holds_alternative<AdapterInfo>(result)) {
    ++record.info.last_step;
  }
  // A checkpoint of kind kSampler has weights only, so it makes no step
  // durable.
  const auto* saved = std::get_if<CheckpointInfo>(&result);
  if (saved != nullptr && saved->kind == CheckpointKind::kTrain) {
    RaiseDurableStep(record, work.step > 0
                                 ? work.step
                                 : s_.scheduler.LastStep(work.adapter));
  }
  if (work.again) {
    s_.scheduler.SkipTo(work.adapter, work.step);
    // The log has it. The end of the replay does not wait for Answer.
    RaiseDurableStep(record, work.step);
  }
  if (const auto* trained = std::get_if<TrainResult>(&result)) {
    const auto& request = std::get<TrainRequest>(work.request);
    record.history.Add(request, *trained, record.info.optim_steps,
                       s_.env.clock->Now());
    if (request.backward) {
      record.info.accumulated_tokens +=
          static_cast<uint64_t>(request.num_tokens());
    }
  }
  const auto* optim = std::get_if<OptimStepRequest>(&work.request);
  const auto* updated = std::get_if<OptimStepResult>(&result);
  if (optim != nullptr && updated != nullptr && !optim->discard) {
    record.history.Add(*updated);
  }
}

StepDesk::StepNode StepDesk::End(uint64_t id,
                                 absl::StatusOr<StepResultPtr> result) {
  StepNode node = s_.steps.extract(id);
  if (node.empty()) return node;
  StepWork& work = *node.mapped();
  if (AdapterRecord* record = s_.Find(work.adapter)) {
    s_.residency.Used(work.adapter, kTraining);
    if (result.ok()) {
      NoteResult(*record, work, **result);
      s_.StoreReply(*record, work.adapter, work.step, *result);
    } else {
      record->replays.Fail(work.step);
    }
    // An empty step ends without the device, which later work may need.
    if (s_.scheduler.ReadyKinds(work.adapter) != 0)
      s_.WantAdapter(work.adapter);
  }
  Answer(work, std::move(result));
  return node;
}

void StepDesk::NoteDurable(AdapterKey adapter, uint64_t step) {
  MutexLock lock(&s_.mu);
  AdapterRecord* record = s_.Find(adapter);
  if (record != nullptr) RaiseDurableStep(*record, step);
}

void StepDesk::Answer(StepWork& work, absl::StatusOr<StepResultPtr> result) {
  const bool recorded = s_.IsRecorded(s_.Find(work.adapter)) && result.ok();
  s_.env.post_durable([this, recorded, adapter = work.adapter, step = work.step,
                       waiters = std::move(work.waiters),
                       result = std::move(result)] {
    if (recorded) NoteDurable(adapter, step);
    for (const StepWork::Waiter& waiter : waiters) {
      waiter.done(result, /*replayed=*/waiter.repeated);
    }
  });
}

bool StepDesk::FinishSlice(uint64_t id) {
  MutexLock lock(&s_.mu);
  const StepWork& work = *s_.steps.at(id);
  if (work.step == 0 && !work.again && work.waiters.empty()) return false;
  s_.scheduler.Finished(id, /*ok=*/true, /*more=*/true);
  return true;
}

void StepDesk::RunLater(RunTrain train) {
  MutexLock lock(&s_.mu);
  s_.later.push_back(std::move(train));
}

void StepDesk::ChargeTime(const StepTask& step, absl::Duration elapsed) {
  MutexLock lock(&s_.mu);
  const auto& request = std::get<TrainRequest>(*step.request);
  s_.scheduler.ChargeTime(s_.SchedulersKey(step.adapter, request.tenant),
                          elapsed);
}

void StepDesk::CountTokens(const RunTrain& train) {
  MutexLock lock(&s_.mu);
  for (const StepSlice& slice : train.slices) {
    const int64_t num_tokens = slice.num_tokens();
    const AdapterKey adapter = slice.step.adapter;
    s_.env.metrics->CountTenantTrain(s_.scheduler.TenantOf(s_.SchedulersKey(
                                         adapter, slice.request().tenant)),
                                     num_tokens);
    if (AdapterRecord* record = s_.Find(adapter)) {
      record->history.CountTrained(num_tokens);
    }
  }
}

}  // namespace weft::dispatch
