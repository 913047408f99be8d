// The engine's door: what the threads of the server call. Nothing here touches
// a tensor or waits for the device.
#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/engine/engine_impl.h"
#include "src/engine/prefix_tree.h"
#include "src/request/digest.h"

namespace weft::engine {
namespace {

// A load has no number of its own: it takes the next one.
uint64_t StepOf(const LoadCheckpointRequest& /*request*/) { return 0; }
template <typename Request>
uint64_t StepOf(const Request& request) {
  return request.step;
}

}  // namespace

absl::Status EngineImpl::CheckOpen() const {
  if (draining_ || stopping_) {
    return absl::UnavailableError("the server is draining; try another one");
  }
  return absl::OkStatus();
}

StepWork& EngineImpl::FindStep(const std::string& adapter_id, uint64_t step,
                               uint64_t* work_id) {
  const auto it = std::ranges::find_if(steps_, [&](const auto& entry) {
    return entry.second->step == step && !entry.second->orphaned &&
           entry.second->adapter_id == adapter_id;
  });
  *work_id = it->first;
  return *it->second;
}

template <typename Request, typename Result>
CancelHandle EngineImpl::SubmitStep(sched::WorkItem item, Request request,
                                    Callback<StepReply<Result>> done) {
  std::string digest = PayloadDigest(request);
  item.adapter = request.adapter_id;
  item.step = StepOf(request);
  item.deadline = request.deadline;
  absl::Status refused;
  uint64_t work_id = 0;
  uint64_t waiter_id = 0;
  {
    MutexLock lock(&mu_);
    waiter_id = next_id_++;
    Waiter waiter = MakeWaiter<Result>(waiter_id, done);
    const auto table = replays_.find(request.adapter_id);
    if (table != replays_.end()) {
      absl::StatusOr<ReplayTable::Answer> answer =
          table->second.Lookup(item.step, digest);
      if (!answer.ok()) {
        refused = answer.status();
      } else if (answer->verdict == ReplayTable::Verdict::kReplay) {
        completions_.Post(
            [waiter = std::move(waiter), result = std::move(answer->result)] {
              waiter.done(result, /*replayed=*/true);
            });
        return {};
      } else if (answer->verdict == ReplayTable::Verdict::kInFlight) {
        StepWork& work = FindStep(request.adapter_id, item.step, &work_id);
        work.waiters.push_back(std::move(waiter));
        work.cancelled = false;
      }
    }
    if (refused.ok() && work_id == 0) refused = CheckOpen();
    if (refused.ok() && work_id == 0) {
      work_id = next_id_++;
      item.id = work_id;
      const sched::WorkKind kind = item.kind;
      absl::StatusOr<uint64_t> step =
          scheduler_.Enqueue(std::move(item), absl::Now());
      if (step.ok()) {
        WantAdapter(request.adapter_id);
        if (*step > 0) {
          replays_.at(request.adapter_id).Begin(*step, digest);
        }
        auto work = std::make_unique<StepWork>();
        work->adapter_id = request.adapter_id;
        work->digest = std::move(digest);
        work->step = *step;
        work->kind = kind;
        work->accepted_at = absl::Now();
        work->waiters.push_back(std::move(waiter));
        work->request = std::move(request);
        steps_.emplace(work_id, std::move(work));
      } else {
        refused = step.status();
      }
    }
  }
  if (!refused.ok()) {
    done(refused);
    return {};
  }
  changed_.NotifyAll();
  return CancelHandle(
      [this, work_id, waiter_id] { CancelStep(work_id, waiter_id); });
}

// As many soft targets take about the time and memory of one more token.
constexpr int64_t kTargetsOfOneRow = 64;

CancelHandle EngineImpl::Train(TrainRequest request,
                               Callback<StepReply<TrainResult>> done) {
  sched::WorkItem item{.kind = sched::WorkKind::kTrain,
                       .backward = request.backward};
  item.datum_tokens.reserve(request.data.size());
  item.datum_prefix.reserve(request.data.size());
  for (size_t d = 0; d < request.data.size(); ++d) {
    const Datum& datum = request.data[d];
    const int64_t rows =
        d > 0 && parts_.options.share_prompts
            ? AddedRows(request.data[d - 1].tokens, datum.tokens)
            : datum.num_tokens();
    item.datum_prefix.push_back(datum.num_tokens() - rows);
    item.datum_tokens.push_back(std::max(
        rows, static_cast<int64_t>(datum.targets.size()) / kTargetsOfOneRow));
  }
  return SubmitStep<TrainRequest, TrainResult>(
      std::move(item), std::move(request), std::move(done));
}

CancelHandle EngineImpl::OptimStep(OptimStepRequest request,
                                   Callback<StepReply<OptimStepResult>> done) {
  return SubmitStep<OptimStepRequest, OptimStepResult>(
      {.kind = sched::WorkKind::kOptim, .tokens = 1}, std::move(request),
      std::move(done));
}

CancelHandle EngineImpl::SaveCheckpoint(
    SaveCheckpointRequest request, Callback<StepReply<CheckpointInfo>> done) {
  return SubmitStep<SaveCheckpointRequest, CheckpointInfo>(
      {.kind = sched::WorkKind::kAdapterOp, .tokens = 1}, std::move(request),
      std::move(done));
}

CancelHandle EngineImpl::LoadCheckpoint(LoadCheckpointRequest request,
                                        Callback<StepReply<AdapterInfo>> done) {
  bool known = false;
  {
    MutexLock lock(&mu_);
    known = scheduler_.LastStep(request.adapter_id).has_value();
  }
  if (!known) {
    LoadNewAdapter(std::move(request), std::move(done));
    return {};
  }
  return SubmitStep<LoadCheckpointRequest, AdapterInfo>(
      {.kind = sched::WorkKind::kAdapterOp, .tokens = 1}, std::move(request),
      std::move(done));
}

CancelHandle EngineImpl::PublishSnapshot(PublishSnapshotRequest request,
                                         Callback<StepReply<uint64_t>> done) {
  return SubmitStep<PublishSnapshotRequest, uint64_t>(
      {.kind = sched::WorkKind::kAdapterOp, .tokens = 1}, std::move(request),
      std::move(done));
}

CancelHandle EngineImpl::Sample(SampleRequest request,
                                std::function<void(SampleDelta)> on_delta,
                                Callback<SampleResult> done) {
  absl::Status refused = sample_loop_.CheckFits(request);
  if (refused.ok() && !request.adapter_id.empty()) {
    refused = adapters_.Info(request.adapter_id).status();
  }
  uint64_t work_id = 0;
  if (refused.ok()) {
    MutexLock lock(&mu_);
    refused = CheckOpen();
    if (refused.ok()) {
      work_id = next_id_++;
      const auto drawn =
          static_cast<int64_t>(request.config.max_tokens) * request.num_samples;
      refused =
          scheduler_
              .Enqueue({.id = work_id,
                        .kind = sched::WorkKind::kSample,
                        .adapter = request.adapter_id,
                        .tokens =
                            static_cast<int64_t>(request.prompt.size()) + drawn,
                        .deadline = request.deadline},
                       absl::Now())
              .status();
    }
    if (refused.ok()) {
      WantAdapter(request.adapter_id);
      samples_.emplace(work_id,
                       std::make_unique<SampleWork>(SampleWork{
                           .tenant = scheduler_.TenantOf(request.adapter_id),
                           .request = std::move(request),
                           .accepted_at = absl::Now(),
                           .on_delta = std::move(on_delta),
                           .done = std::move(done)}));
    }
  }
  if (!refused.ok()) {
    done(refused);
    return {};
  }
  changed_.NotifyAll();
  return CancelHandle([this, work_id] { CancelSample(work_id); });
}

void EngineImpl::CancelStep(uint64_t work_id, uint64_t waiter_id) {
  MutexLock lock(&mu_);
  const auto it = steps_.find(work_id);
  if (it == steps_.end()) return;
  std::vector<Waiter>& waiters = it->second->waiters;
  const auto waiter = std::find_if(
      waiters.begin(), waiters.end(),
      [&](const Waiter& candidate) { return candidate.id == waiter_id; });
  if (waiter == waiters.end()) return;
  if (waiters.size() == 1) {
    it->second->cancelled = true;
    if (!it->second->started && scheduler_.Cancel(work_id)) {
      DropStep(work_id, absl::CancelledError("cancelled by the client"));
    }
    return;
  }
  completions_.Post([done = std::move(waiter->done)] {
    done(absl::CancelledError("cancelled by the client"), false);
  });
  waiters.erase(waiter);
}

void EngineImpl::CancelSample(uint64_t work_id) {
  {
    MutexLock lock(&mu_);
    if (!samples_.contains(work_id)) return;
    if (scheduler_.Cancel(work_id)) {
      DropSample(work_id, absl::CancelledError("cancelled by the client"));
      return;
    }
    cancelled_samples_.push_back(work_id);
  }
  changed_.NotifyAll();
}

void EngineImpl::PostControl(std::function<void()> task) {
  {
    MutexLock lock(&mu_);
    control_.push_back(std::move(task));
  }
  changed_.NotifyAll();
}

void EngineImpl::GetAdapter(std::string adapter_id,
                            Callback<AdapterInfo> done) {
  done(adapters_.Info(adapter_id));
}

void EngineImpl::ListAdapters(Callback<std::vector<AdapterInfo>> done) {
  done(adapters_.Infos());
}

void EngineImpl::Drain(Callback<bool> done) {
  {
    MutexLock lock(&mu_);
    draining_ = true;
    drain_waiters_.push_back(std::move(done));
  }
  changed_.NotifyAll();
}

}  // namespace weft::engine
