// Steps that run alone (optimizer, checkpoints, snapshots) and the operations
// on adapters as a whole.
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/log.h"
#include "src/engine/engine_impl.h"
#include "src/lora/peft_format.h"
#include "src/optim/adamw.h"

namespace weft::engine {
namespace {

// Buffers of the two are interchangeable. The seed does not matter.
bool SameShape(const LoraConfig& a, const LoraConfig& b) {
  return a.rank == b.rank && a.alpha == b.alpha &&
         a.target_modules == b.target_modules && a.overrides == b.overrides;
}

}  // namespace

void EngineImpl::RunOptim(uint64_t work_id, const OptimStepRequest& request) {
  lora::Adapter& adapter = *adapters_.Find(request.adapter_id);
  const absl::Time start = absl::Now();
  double norm = 0;
  const absl::Status status = Compute("OptimStep", [&] {
    norm = optim::GradientNorm(adapter.gradient());
    if (!std::isfinite(norm)) {
      adapter.gradient().zero_();
      return;
    }
    at::Tensor next = adapter.NextWeights();
    optim::AdamWStep(request.adamw,
                     static_cast<int64_t>(adapter.optim_steps()) + 1, norm,
                     adapter.latest()->weights_N, adapter.gradient(),
                     adapter.moment1(), adapter.moment2(), next);
    adapter.FinishStep(std::move(next));
  });
  probe_.ObserveOptim(norm, absl::Now() - start);
  if (!status.ok()) {
    CompleteStep(work_id, status);
    return;
  }
  if (!std::isfinite(norm)) {
    CompleteStep(work_id,
                 absl::FailedPreconditionError(absl::StrCat(
                     "the accumulated gradient is not finite (norm ", norm,
                     "); it was cleared and the weights are unchanged")));
    return;
  }
  OptimStepResult result{.grad_norm = norm,
                         .version = adapter.latest()->number};
  {
    MutexLock lock(&mu_);
    result.step = steps_.at(work_id)->step;
  }
  CompleteStep(
      work_id,
      ErasedResult(std::make_shared<const OptimStepResult>(std::move(result))));
}

void EngineImpl::RunSave(uint64_t work_id,
                         const SaveCheckpointRequest& request) {
  const lora::Adapter& adapter = *adapters_.Find(request.adapter_id);
  lora::AdapterState state;
  uint64_t step = 0;
  uint64_t last_step = 0;
  {
    MutexLock lock(&mu_);
    step = steps_.at(work_id)->step;
    last_step =
        step > 0 ? step : scheduler_.LastStep(request.adapter_id).value_or(0);
  }
  const absl::Status status =
      Guarded("SaveCheckpoint", [&] { state = adapter.GetState(); });
  if (!status.ok()) {
    CompleteStep(work_id, status);
    return;
  }
  PostIo([this, work_id, request, config = adapter.config(),
          state = std::move(state), last_step] {
    const absl::Time start = absl::Now();
    absl::StatusOr<CheckpointInfo> info =
        adapter_io_.Save(request, config, state, last_step);
    probe_.ObserveCheckpoint("save", info.ok(), absl::Now() - start);
    PostControl([this, work_id, info = std::move(info)] {
      if (!info.ok()) {
        CompleteStep(work_id, info.status());
        return;
      }
      CompleteStep(work_id,
                   ErasedResult(std::make_shared<const CheckpointInfo>(*info)));
    });
  });
}

void EngineImpl::RunLoad(uint64_t work_id,
                         const LoadCheckpointRequest& request) {
  PostIo([this, work_id, request] {
    const absl::Time start = absl::Now();
    absl::StatusOr<LoadedCheckpoint> loaded =
        adapter_io_.Load(request.source_adapter_id, request.name);
    probe_.ObserveCheckpoint("load", loaded.ok(), absl::Now() - start);
    PostControl([this, work_id, request, loaded = std::move(loaded)]() mutable {
      InstallCheckpoint(work_id, request, std::move(loaded));
    });
  });
}

void EngineImpl::InstallCheckpoint(uint64_t work_id,
                                   const LoadCheckpointRequest& request,
                                   absl::StatusOr<LoadedCheckpoint> loaded) {
  lora::Adapter* adapter = adapters_.Find(request.adapter_id);
  absl::Status status = loaded.status();
  if (status.ok() && (adapter == nullptr || IsOrphaned(work_id))) {
    status = NoSuchAdapter(request.adapter_id);
  }
  if (status.ok() && !SameShape(loaded->info.config, adapter->config())) {
    status = absl::FailedPreconditionError(absl::StrCat(
        "name: checkpoint '", request.name, "' has rank ",
        loaded->info.config.rank, ", alpha ", loaded->info.config.alpha, ", ",
        loaded->info.config.target_modules.size(), " target modules and ",
        loaded->info.config.overrides.size(),
        " layers of another shape; adapter '", request.adapter_id,
        "' has rank ", adapter->config().rank, ", alpha ",
        adapter->config().alpha, ", ", adapter->config().target_modules.size(),
        " and ", adapter->config().overrides.size()));
  }
  uint64_t last_step = 0;
  if (status.ok()) {
    if (request.weights_only) {
      loaded->state = {.weights = std::move(loaded->state.weights)};
    } else {
      last_step = loaded->info.last_step;
    }
    status =
        Guarded("LoadCheckpoint", [&] { adapter->SetState(loaded->state); });
  }
  if (!status.ok()) {
    CompleteStep(work_id, status);
    return;
  }
  RestartNumbers(work_id, request.adapter_id, last_step);
  adapters_.Publish(request.adapter_id, last_step);
  absl::StatusOr<AdapterInfo> info = adapters_.Info(request.adapter_id);
  CompleteStep(work_id,
               ErasedResult(std::make_shared<const AdapterInfo>(*info)));
}

bool EngineImpl::IsOrphaned(uint64_t work_id) {
  MutexLock lock(&mu_);
  return steps_.at(work_id)->orphaned;
}

void EngineImpl::RestartNumbers(uint64_t work_id, const std::string& adapter_id,
                                uint64_t last_step) {
  MutexLock lock(&mu_);
  // The loaded state has its own count; the load itself is not part of it.
  steps_.at(work_id)->step = 0;
  const sched::AdapterQueue::StepChange changed =
      scheduler_.SetLastStep(adapter_id, last_step);
  for (const uint64_t id : changed.dropped) {
    DropStep(id, absl::FailedPreconditionError(absl::StrCat(
                     "step: a checkpoint was loaded, the next number is ",
                     last_step + 1)));
  }
  ReplayTable table;
  for (const auto& [id, step] : changed.renumbered) {
    steps_.at(id)->step = step;
  }
  for (const auto& [id, work] : steps_) {
    if (work->adapter_id == adapter_id && work->step > 0) {
      table.Begin(work->step, work->digest);
    }
  }
  replays_.insert_or_assign(adapter_id, std::move(table));
}

void EngineImpl::RunPublishSnapshot(uint64_t work_id,
                                    const PublishSnapshotRequest& request) {
  absl::StatusOr<uint64_t> version =
      adapters_.PublishSnapshot(request.adapter_id, request.name);
  if (!version.ok()) {
    CompleteStep(work_id, version.status());
    return;
  }
  CompleteStep(work_id,
               ErasedResult(std::make_shared<const uint64_t>(*version)));
}

}  // namespace weft::engine
