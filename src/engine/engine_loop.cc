// The engine thread: what to run next, and with what guard.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
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
  // The current device of this thread, on which our kernels run.
  const c10::DeviceGuard on_device(parts_.decoder->device());
  ShowDevice();
  std::deque<std::function<void()>> control;
  sched::Plan plan;
  while (WaitForWork(&control, &plan)) {
    for (std::function<void()>& task : control) task();
    control.clear();
    RunPlan(plan);
    ShowDevice();
    probe_.Heartbeat();
  }
}

void EngineImpl::ShowDevice() {
  // A lost device is asked nothing.
  if (!failure().ok()) return;
  const DeviceMemory memory = parts_.device->Memory();
  probe_.SetDeviceMemory(memory.total, memory.reserved, memory.allocated);
}

absl::Status EngineImpl::Guarded(const char* what,
                                 const std::function<void()>& body) {
  const absl::Status status = RunGuarded(what, body);
  // The device may wait for ever once the group has failed.
  if (status.ok() || group_.failed()) return status;
  if (absl::IsResourceExhausted(status)) parts_.device->ReleaseCached();
  const absl::Status answers = parts_.device->CheckAnswers();
  if (answers.ok()) return status;
  return Fail(what, answers, "the server has lost its device");
}

absl::Status EngineImpl::Compute(const char* what,
                                 const std::function<void()>& body) {
  if (absl::Status failed = failure(); !failed.ok()) return failed;
  const absl::Status status = Guarded(what, body);
  if (!group_.failed()) return status;
  const absl::Status failed =
      Fail(what, status, "the ranks of the server have lost each other");
  // Whoever asked for more than there is must not ask the next server again.
  return absl::IsResourceExhausted(status) ? status : failed;
}

absl::Status EngineImpl::Fail(const char* what, const absl::Status& reason,
                              std::string_view message) {
  Log(LogLevel::kError, message,
      {{"work", what}, {"error", std::string(reason.message())}});
  MutexLock lock(&mu_);
  failure_ = absl::UnavailableError(absl::StrCat(
      std::string(message),
      "; it restarts, and what was not acknowledged has not been done"));
  return failure_;
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

}  // namespace weft::engine
