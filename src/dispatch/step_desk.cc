#include "src/dispatch/step_desk.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft::dispatch {
namespace {

using Verdict = ReplayTable::Verdict;

}  // namespace

CancelHandle StepDesk::Submit(StepRequest request, sched::WorkItem item,
                              StepCallback done) {
  // Linear in the bytes of the request: not under the lock.
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

absl::StatusOr<CancelHandle> StepDesk::Accept(StepRequest& request,
                                              sched::WorkItem item,
                                              std::string digest,
                                              const StepCallback& done) {
  MutexLock lock(&s_.mu);
  const std::string& adapter_id = AdapterIdOf(request);
  item.step = StepOf(request);
  item.deadline = DeadlineOf(request);
  const uint64_t waiter_id = s_.next_id++;
  const std::optional<AdapterKey> key = s_.KeyOf(adapter_id);
  AdapterRecord* record = key ? s_.Find(*key) : nullptr;
  if (record != nullptr) {
    WEFT_ASSIGN_OR_RETURN(ReplayTable::Answer answer,
                          record->replays.Lookup(item.step, digest));
    if (answer.verdict == Verdict::kReplay) {
      s_.env.post_reply([done, result = std::move(answer.result)] {
        done(result, /*replayed=*/true);
      });
      return CancelHandle();
    }
    if (answer.verdict == Verdict::kInFlight) {
      StepWork& work = *s_.steps.at(answer.work_id);
      work.waiters.push_back({.id = waiter_id, .done = done});
      work.cancelled = false;
      return CancelHandle(
          [this, id = answer.work_id, waiter_id] { Cancel(id, waiter_id); });
    }
  }
  WEFT_RETURN_IF_ERROR(s_.CheckOpen());
  if (!key) return NoSuchAdapter(adapter_id);
  const uint64_t id = s_.next_id++;
  const absl::Time now = s_.env.clock->Now();
  item.id = id;
  item.adapter = *key;
  const sched::WorkKind kind = item.kind;
  WEFT_ASSIGN_OR_RETURN(const uint64_t step,
                        s_.scheduler.Enqueue(std::move(item), now));
  s_.WantAdapter(*key);
  if (record != nullptr) record->replays.Begin(step, digest, id);
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
  const absl::Status cancelled =
      absl::CancelledError("cancelled by the client");
  MutexLock lock(&s_.mu);
  const auto it = s_.steps.find(id);
  if (it == s_.steps.end()) return;
  StepWork& work = *it->second;
  const auto waiter =
      std::ranges::find(work.waiters, waiter_id, &StepWork::Waiter::id);
  if (waiter == work.waiters.end()) return;
  if (work.waiters.size() == 1) {
    work.cancelled = true;
    if (s_.scheduler.Cancel(id)) s_.Drop(id, cancelled);
    // What waited for it may run now, and so may a drain.
    s_.changed.NotifyAll();
    return;
  }
  s_.env.post_reply(
      [done = std::move(waiter->done), cancelled] { done(cancelled, false); });
  work.waiters.erase(waiter);
}

void StepDesk::Complete(uint64_t id, absl::StatusOr<StepResult> result,
                        const std::optional<AdapterFacts>& facts) {
  absl::StatusOr<StepResultPtr> shared =
      result.ok() ? absl::StatusOr<StepResultPtr>(
                        std::make_shared<const StepResult>(*std::move(result)))
                  : result.status();
  StepNode ended;
  MutexLock lock(&s_.mu);
  const auto work = s_.steps.find(id);
  if (facts && work != s_.steps.end()) {
    AdapterRecord* record = s_.Find(work->second->adapter);
    if (record != nullptr) s_.SetFacts(*record, *facts);
  }
  ended = End(id, std::move(shared));
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
      s_.StoreReply(*record, work, *result);
    } else {
      record->replays.Fail(work.step);
    }
  }
  s_.env.post_reply(
      [waiters = std::move(work.waiters), result = std::move(result)] {
        // Whoever joined the first call's step is told that it ran once.
        for (const StepWork::Waiter& waiter : waiters) {
          waiter.done(result, /*replayed=*/&waiter != &waiters.front());
        }
      });
  return node;
}

bool StepDesk::FinishSlice(uint64_t id) {
  StepNode ended;
  MutexLock lock(&s_.mu);
  if (!s_.steps.at(id)->cancelled) {
    s_.scheduler.Finished(id, /*ok=*/true);
    return true;
  }
  ended = End(id, absl::CancelledError("cancelled by the client"));
  return false;
}

void StepDesk::RestartNumbers(const StepTask& running, uint64_t last_step,
                              const AdapterFacts& facts) {
  MutexLock lock(&s_.mu);
  AdapterRecord* record = s_.Find(running.adapter);
  if (record == nullptr) return;
  s_.SetFacts(*record, facts);
  const sched::AdapterQueue::StepChange changed =
      s_.scheduler.SetLastStep(running.adapter, last_step);
  for (const uint64_t id : changed.dropped) {
    s_.Drop(id, absl::FailedPreconditionError(absl::StrCat(
                    "step: a checkpoint was loaded, the next number is ",
                    last_step + 1)));
  }
  for (const auto& [id, step] : changed.renumbered) {
    s_.steps.at(id)->step = step;
  }
  s_.ForgetReplies(*record);
  record->replays = ReplayTable();
  for (const auto& [id, work] : s_.steps) {
    if (work->adapter == running.adapter) {
      record->replays.Begin(work->step, work->digest, id);
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
    s_.env.metrics->CountTenantTrain(
        s_.scheduler.TenantOf(train.steps[i].adapter), num_tokens);
  }
}

}  // namespace weft::dispatch
