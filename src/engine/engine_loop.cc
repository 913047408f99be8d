// The engine thread: plan, run, complete.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "src/base/log.h"
#include "src/engine/engine_impl.h"
#include "src/engine/torch_guard.h"

namespace weft::engine {
namespace {

// How long the thread sleeps when there is nothing to do: bounds how late a
// deadline is noticed and how old the heartbeat gets.
constexpr absl::Duration kIdleWait = absl::Milliseconds(200);

// How soon an idle server notices that a rank is gone that somebody else has
// started.
constexpr absl::Duration kPingInterval = absl::Seconds(1);

// As `top -H` shows it and its compute threads, which inherit the name.
constexpr const char* kThreadName = "weft-engine";

}  // namespace

void EngineImpl::Loop() {
  pthread_setname_np(pthread_self(), kThreadName);
  // No autograd anywhere: gradients are written by hand.
  const at::InferenceMode no_autograd;
  // Of this thread; kernels of ours run on it.
  const c10::DeviceGuard on_device(parts_.decoder->device());
  std::deque<std::function<void()>> control;
  sched::Plan plan;
  while (WaitForWork(&control, &plan)) {
    for (std::function<void()>& task : control) task();
    control.clear();
    RunPlan(plan);
    probe_.Heartbeat();
  }
}

absl::Status EngineImpl::Compute(const char* what,
                                 const std::function<void()>& body) {
  if (absl::Status failed = failure(); !failed.ok()) return failed;
  const absl::Status status = RunGuarded(what, body);
  if (!group_.failed()) return status;
  Log(LogLevel::kError, "the group of ranks has failed",
      {{"work", what}, {"error", std::string(status.message())}});
  MutexLock lock(&mu_);
  failure_ = absl::UnavailableError(
      "the ranks of the server have lost each other; it restarts, and what was "
      "not acknowledged has not been done");
  // Whoever asked for more than there is must not ask the next server again.
  return absl::IsResourceExhausted(status) ? status : failure_;
}

void EngineImpl::Ping() {
  Compute("Ping", [this] { group_.Ping(); }).IgnoreError();
  last_ping_ = absl::Now();
}

absl::Status EngineImpl::failure() const {
  MutexLock lock(&mu_);
  return failure_;
}

bool EngineImpl::WaitForWork(std::deque<std::function<void()>>* control,
                             sched::Plan* plan) {
  MutexLock lock(&mu_);
  for (;;) {
    if (stopping_) return false;
    ExpireWork();
    for (const uint64_t id : std::exchange(cancelled_samples_, {})) {
      if (sample_loop_.Cancel(id)) {
        DropSample(id, absl::CancelledError("cancelled by the client"));
      }
    }
    // Control tasks first and alone: a plan may name only adapters that exist
    // when it runs.
    *plan = sched::Plan();
    control->swap(control_);
    if (!control->empty()) return true;
    if (std::optional<sched::Move> move = NextMove()) {
      control->push_back([this, move = *std::move(move)] { RunMove(move); });
      return true;
    }
    *plan = scheduler_.Next(absl::Now(), sample_loop_.active());
    probe_.SetQueues(scheduler_);
    if (plan->kind != sched::Plan::Kind::kNone) return true;
    AnswerDrainWhenIdle();
    probe_.Heartbeat();
    if (!group_.alone() && failure_.ok() &&
        absl::Now() - last_ping_ >= kPingInterval) {
      control->push_back([this] { Ping(); });
      return true;
    }
    const absl::Duration wait =
        std::min(kIdleWait, scheduler_.NextDeadline() - absl::Now());
    changed_.WaitFor(
        &mu_, absl::ToChronoNanoseconds(std::max(wait, absl::Milliseconds(1))));
  }
}

void EngineImpl::ExpireWork() {
  const absl::Time now = absl::Now();
  for (const uint64_t id : scheduler_.TakeExpired(now)) {
    const absl::Status late = absl::DeadlineExceededError(
        "the deadline passed while the request waited in the queue");
    if (samples_.contains(id)) {
      DropSample(id, late);
    } else {
      DropStep(id, late);
    }
  }
}

void EngineImpl::RunPlan(const sched::Plan& plan) {
  const absl::Time start = absl::Now();
  switch (plan.kind) {
    case sched::Plan::Kind::kNone:
      return;
    case sched::Plan::Kind::kTrain:
      RunTrain(plan);
      break;
    case sched::Plan::Kind::kExclusive:
      RunExclusive(plan.work_id);
      break;
    case sched::Plan::Kind::kDecode:
      RunDecode();
      break;
  }
  MutexLock lock(&mu_);
  scheduler_.AccountDeviceTime(plan.kind, absl::Now() - start);
}

void EngineImpl::RunTrain(const sched::Plan& plan) {
  std::vector<const StepWork*> works;
  {
    MutexLock lock(&mu_);
    for (const sched::TrainSlice& slice : plan.slices) {
      StepWork& work = *steps_.at(slice.work_id);
      if (!work.started) probe_.ObserveWait(work.kind, work.accepted_at);
      work.started = true;
      works.push_back(&work);
    }
  }
  const absl::Status status = RunTrainPieces(plan, works);
  if (status.ok()) CountTenantTokens(plan, works);
  for (size_t i = 0; i < plan.slices.size(); ++i) {
    const sched::TrainSlice& slice = plan.slices[i];
    if (!status.ok()) {
      progress_.erase(slice.work_id);
      CompleteStep(slice.work_id, status);
    } else if (slice.last) {
      TrainProgress& progress = progress_.at(slice.work_id);
      progress.result.metrics = progress.metrics.Metrics();
      progress.result.step = works[i]->step;
      auto result =
          std::make_shared<const TrainResult>(std::move(progress.result));
      progress_.erase(slice.work_id);
      CompleteStep(slice.work_id, ErasedResult(std::move(result)));
    } else {
      FinishSlice(slice.work_id);
    }
  }
}

void EngineImpl::CountTenantTokens(const sched::Plan& plan,
                                   const std::vector<const StepWork*>& works) {
  MutexLock lock(&mu_);
  for (size_t i = 0; i < works.size(); ++i) {
    const sched::TrainSlice& slice = plan.slices[i];
    const auto& request = std::get<TrainRequest>(works[i]->request);
    int64_t num_tokens = 0;
    for (int64_t d = 0; d < slice.num_data; ++d) {
      num_tokens += request.data[slice.first_datum + d].num_tokens();
    }
    probe_.CountTenantTrain(scheduler_.TenantOf(request.adapter_id),
                            num_tokens);
  }
}

void EngineImpl::FinishSlice(uint64_t work_id) {
  {
    MutexLock lock(&mu_);
    if (!steps_.at(work_id)->cancelled) {
      scheduler_.Finished(work_id, /*ok=*/true);
      return;
    }
  }
  progress_.erase(work_id);
  CompleteStep(work_id, absl::CancelledError("cancelled by the client"));
}

absl::Status EngineImpl::RunTrainPieces(
    const sched::Plan& plan, const std::vector<const StepWork*>& works) {
  std::vector<TrainPiece> pieces;
  std::vector<loss::MetricSums*> metrics;
  // Adapters whose scratch holds this batch, and whether it is complete.
  std::vector<std::pair<lora::Adapter*, bool>> touched;
  std::vector<lora::Adapter*> fresh;
  int64_t num_tokens = 0;
  for (size_t i = 0; i < plan.slices.size(); ++i) {
    const sched::TrainSlice& slice = plan.slices[i];
    const auto& request = std::get<TrainRequest>(works[i]->request);
    TrainPiece piece{.request = &request,
                     .first_datum = slice.first_datum,
                     .num_data = slice.num_data};
    if (lora::Adapter* adapter = adapters_.Find(request.adapter_id)) {
      piece.version = adapter->latest();
      if (plan.backward) {
        const bool is_new = touched.empty() || touched.back().first != adapter;
        // A slice that continues a request adds to what its earlier ones left.
        if (is_new && slice.first_datum == 0) fresh.push_back(adapter);
        if (is_new) touched.emplace_back(adapter, slice.last);
        piece.gradient_N = adapter->scratch();
      }
    }
    for (int64_t d = 0; d < slice.num_data; ++d) {
      num_tokens += request.data[slice.first_datum + d].num_tokens();
    }
    pieces.push_back(std::move(piece));
    metrics.push_back(&progress_[slice.work_id].metrics);
  }

  const absl::Time start = absl::Now();
  absl::StatusOr<TrainOutcome> outcome = absl::InternalError("not run");
  absl::Status status =
      Compute(plan.backward ? "ForwardBackward" : "Forward", [&] {
        for (lora::Adapter* adapter : fresh) adapter->ClearScratch();
        outcome = train_runner_.Run(pieces, plan.backward, metrics);
        if (!outcome.ok()) return;
        for (const auto& [adapter, complete] : touched) {
          if (complete) adapter->CommitScratch();
        }
      });
  probe_.ObserveTrain(plan.backward, num_tokens, absl::Now() - start);
  if (status.ok()) status = outcome.status();
  if (!status.ok()) return status;

  size_t next = 0;
  for (const sched::TrainSlice& slice : plan.slices) {
    std::vector<DatumResult>& data = progress_[slice.work_id].result.data;
    for (int64_t d = 0; d < slice.num_data; ++d) {
      data.push_back(std::move(outcome->data[next++]));
    }
  }
  return absl::OkStatus();
}

void EngineImpl::RunExclusive(uint64_t work_id) {
  const StepWork* work = nullptr;
  {
    MutexLock lock(&mu_);
    StepWork& found = *steps_.at(work_id);
    probe_.ObserveWait(found.kind, found.accepted_at);
    found.started = true;
    work = &found;
  }
  if (const auto* optim = std::get_if<OptimStepRequest>(&work->request)) {
    RunOptim(work_id, *optim);
  } else if (const auto* save =
                 std::get_if<SaveCheckpointRequest>(&work->request)) {
    RunSave(work_id, *save);
  } else if (const auto* load =
                 std::get_if<LoadCheckpointRequest>(&work->request)) {
    RunLoad(work_id, *load);
  } else {
    RunPublishSnapshot(work_id,
                       std::get<PublishSnapshotRequest>(work->request));
  }
}

void EngineImpl::AdmitSamples() {
  MutexLock lock(&mu_);
  for (;;) {
    const std::vector<uint64_t> taken = scheduler_.TakeSamples(absl::Now(), 1);
    if (taken.empty()) return;
    const uint64_t id = taken.front();
    const SampleWork& work = *samples_.at(id);
    if (!sample_loop_.HasRoom(work.request)) {
      scheduler_.PutBack(id);
      return;
    }
    lora::AdapterVersionPtr version;
    if (!work.request.adapter_id.empty()) {
      absl::StatusOr<lora::AdapterVersionPtr> found =
          adapters_.Version(work.request.adapter_id, work.request.snapshot);
      if (!found.ok()) {
        DropSample(id, found.status());
        continue;
      }
      version = *std::move(found);
    }
    probe_.ObserveWait(sched::WorkKind::kSample, work.accepted_at);
    sample_loop_.Admit(id, &work.request, work.on_delta != nullptr,
                       work.accepted_at, std::move(version));
    residency_.Used(work.request.adapter_id, sched::kSampling);
  }
}

void EngineImpl::RunDecode() {
  AdmitSamples();
  std::vector<SampleEvent> events;
  const absl::Status status =
      Compute("Sample", [&] { events = sample_loop_.Step(); });
  MutexLock lock(&mu_);
  if (!status.ok()) {
    for (const uint64_t id : sample_loop_.CancelAll()) DropSample(id, status);
    return;
  }
  for (SampleEvent& event : events) {
    const auto it = samples_.find(event.work_id);
    if (!event.deltas.empty()) {
      completions_.Post([on_delta = it->second->on_delta,
                         deltas = std::move(event.deltas)]() mutable {
        for (SampleDelta& delta : deltas) on_delta(std::move(delta));
      });
    }
    if (event.finished) {
      if (event.result.ok()) CountTenantTokens(*it->second, *event.result);
      completions_.Post([done = std::move(it->second->done),
                         result = std::move(event.result)]() mutable {
        done(std::move(result));
      });
      samples_.erase(it);
    }
  }
}

void EngineImpl::CountTenantTokens(const SampleWork& work,
                                   const SampleResult& result) {
  auto num_tokens = static_cast<int64_t>(work.request.prompt.size());
  for (const weft::Sample& sample : result.samples) {
    num_tokens += static_cast<int64_t>(sample.tokens.size());
  }
  probe_.CountTenantSample(work.tenant, num_tokens);
}

void EngineImpl::CompleteStep(uint64_t work_id,
                              absl::StatusOr<ErasedResult> result) {
  std::unique_ptr<StepWork> work;
  uint64_t last_step = 0;
  {
    MutexLock lock(&mu_);
    scheduler_.Finished(work_id, result.ok());
    const auto it = steps_.find(work_id);
    if (it == steps_.end()) return;  // Its adapter was deleted meanwhile.
    work = std::move(it->second);
    steps_.erase(it);
    if (!work->orphaned) residency_.Used(work->adapter_id, sched::kTraining);
    const auto table = replays_.find(work->adapter_id);
    if (work->step > 0 && !work->orphaned && table != replays_.end()) {
      if (result.ok()) {
        table->second.Complete(work->step, *result);
      } else {
        table->second.Fail(work->step);
      }
    }
    last_step = scheduler_.LastStep(work->adapter_id).value_or(0);
  }
  adapters_.Publish(work->adapter_id, last_step);
  completions_.Post(
      [waiters = std::move(work->waiters), result = std::move(result)] {
        // Whoever joined the first call's step is told that it ran once.
        for (const Waiter& waiter : waiters) {
          waiter.done(result, /*replayed=*/&waiter != &waiters.front());
        }
      });
}

void EngineImpl::DropStep(uint64_t work_id, const absl::Status& status) {
  const auto it = steps_.find(work_id);
  if (it == steps_.end()) return;
  std::unique_ptr<StepWork> work = std::move(it->second);
  steps_.erase(it);
  const auto table = replays_.find(work->adapter_id);
  if (work->step > 0 && table != replays_.end()) {
    table->second.Fail(work->step);
  }
  completions_.Post([waiters = std::move(work->waiters), status] {
    for (const Waiter& waiter : waiters) waiter.done(status, false);
  });
  // What waited behind it may be able to run now.
  if (scheduler_.ReadyKinds(work->adapter_id) != 0) {
    WantAdapter(work->adapter_id);
  }
}

void EngineImpl::DropSample(uint64_t work_id, const absl::Status& status) {
  const auto it = samples_.find(work_id);
  if (it == samples_.end()) return;
  completions_.Post(
      [done = std::move(it->second->done), status] { done(status); });
  samples_.erase(it);
}

void EngineImpl::AnswerDrainWhenIdle() {
  if (!draining_ || drain_waiters_.empty() || !steps_.empty() ||
      !samples_.empty() || residency_.has_waiters() || pending_io_ > 0) {
    return;
  }
  for (Callback<bool>& done : std::exchange(drain_waiters_, {})) {
    completions_.Post([done = std::move(done)] { done(true); });
  }
}

}  // namespace weft::engine
