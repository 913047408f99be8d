#include "src/engine/train/step_executor.h"

#include <ATen/ATen.h>

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/observe/profile.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/adapters/state_image.h"
#include "src/log/record.h"
#include "src/loss/adamw.h"
#include "src/loss/muon.h"

namespace weft::engine {
namespace {

// Returns whether an adapter with config `a` can take the state of an adapter
// with config `b`. Ignores the seed. Also ignores expert_rank: it is 0 in every
// existing adapter, and `overrides` has the experts' ranks instead.
bool SameShape(const LoraConfig& a, const LoraConfig& b) {
  return a.rank == b.rank && a.alpha == b.alpha &&
         a.target_modules == b.target_modules && a.overrides == b.overrides;
}

absl::Status NotFinite(double norm) {
  if (!std::isfinite(norm)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the accumulated gradient is not finite (norm ", norm,
                     "); it was cleared and the weights are unchanged"));
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "the accumulated gradient is not finite when it is squared in f32 "
      "(norm ",
      norm,
      " > 1.8e19); it was cleared and the weights are unchanged. Lower the "
      "weights and advantages, or clip with max_grad_norm"));
}

// Refuses a step of another optimizer than the one whose state the adapter has.
// Such a step would take one optimizer's moments for the other's.
absl::Status CheckOptimizer(const lora::Adapter& adapter,
                            const OptimStepRequest& request) {
  const Optimizer before = adapter.optimizer();
  if (adapter.optim_steps() == 0 || before == request.optimizer()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      OptimizerName(request.optimizer()), ": adapter '", request.adapter_id,
      "' has the state of ", OptimizerName(before), " (optim_steps is ",
      adapter.optim_steps(),
      "), which no other optimizer can continue: go on with ",
      OptimizerName(before),
      ", or save the adapter and load the checkpoint with weights_only, which "
      "drops this state"));
}

// Runs a part of the step. Returns true if it is the last one, which writes the
// weights after the step to `next`. `norm` is that of the gradient.
bool RunOptimizer(const OptimStepRequest& request, size_t part, double norm,
                  lora::Adapter& adapter, at::Tensor& next) {
  const at::Tensor& weights_N = adapter.latest()->weights_N;
  if (request.muon) {
    // No request adds to the scratch now, and the next one clears it.
    return loss::MuonPart(part, *request.muon, norm, adapter.layout(),
                          weights_N, adapter.gradient(), adapter.moment1(),
                          adapter.scratch(), next);
  }
  loss::AdamWStep(request.adamw,
                  static_cast<int64_t>(adapter.optim_steps()) + 1, norm,
                  weights_N, adapter.gradient(), adapter.moment1(),
                  adapter.moment2(), next);
  return true;
}

absl::Status OtherShape(const LoadCheckpointRequest& request,
                        const LoraConfig& loaded, const LoraConfig& config) {
  return absl::FailedPreconditionError(absl::StrCat(
      "name: checkpoint '", request.name, "' has rank ", loaded.rank,
      ", alpha ", loaded.alpha, ", ", loaded.target_modules.size(),
      " target modules and ", loaded.overrides.size(),
      " layers of another shape; adapter '", request.adapter_id, "' has rank ",
      config.rank, ", alpha ", config.alpha, ", ", config.target_modules.size(),
      " and ", config.overrides.size()));
}

}  // namespace

void StepExecutor::Run(const StepTask& step) {
  const StepRequest& request = *step.request;
  if (const auto* refused = std::get_if<RefusedStep>(&request)) {
    Complete(step, refused->status).IgnoreError();
  } else if (const auto* save = std::get_if<SaveCheckpointRequest>(&request)) {
    Save(step, *save);
  } else if (const auto* load = std::get_if<LoadCheckpointRequest>(&request)) {
    Load(step, *load);
  } else {
    std::optional<absl::StatusOr<StepResult>> ended = RunPart(step);
    if (!ended && !context_.dispatcher.steps().FinishSlice(step.id)) {
      Forget(step.id);
      ended = absl::CancelledError("cancelled by the client");
    }
    // The dispatcher already has the error.
    if (ended) End(step, *std::move(ended)).IgnoreError();
  }
}

absl::StatusOr<StepResult> StepExecutor::RunNow(const StepTask& step) {
  std::optional<absl::StatusOr<StepResult>> ended;
  while (!ended) ended = RunPart(step);
  return End(step, *std::move(ended));
}

std::optional<absl::StatusOr<StepResult>> StepExecutor::RunPart(
    const StepTask& step) {
  context_.before_change(step.adapter);
  const auto* optim = std::get_if<OptimStepRequest>(step.request);
  if (optim != nullptr) return OptimPart(step, *optim);
  return Publish(step, std::get<PublishSnapshotRequest>(*step.request));
}

absl::StatusOr<StepResult> StepExecutor::End(
    const StepTask& step, absl::StatusOr<StepResult> result) {
  // A step that failed may have cleared the gradient.
  return Complete(step, std::move(result),
                  context_.adapters.Facts(step.adapter));
}

absl::StatusOr<StepResult> StepExecutor::Complete(
    const StepTask& step, absl::StatusOr<StepResult> result,
    const std::optional<dispatch::AdapterFacts>& facts) {
  if (step.step > 0) result = StoredResult(std::move(result));
  if (result.ok()) {
    const profile::Span span("record step");
    context_.recorder.Done(step, *result);
  }
  context_.dispatcher.steps().Complete(step.id, result, facts);
  return result;
}

std::optional<absl::StatusOr<StepResult>> StepExecutor::OptimPart(
    const StepTask& step, const OptimStepRequest& request) {
  lora::Adapter& adapter = *context_.adapters.Find(step.adapter);
  const auto begun = optim_.extract(step.id);
  OptimProgress progress = begun.empty() ? OptimProgress() : begun.mapped();
  if (progress.next_part == 0 && !request.discard) {
    const absl::Status status = CheckOptimizer(adapter, request);
    if (!status.ok()) return status;
  }
  const uint64_t accumulated_tokens = adapter.accumulated_tokens();
  const absl::Time start = SteadyNow();
  double& norm = progress.norm;
  bool fits = true;
  bool ended = true;
  const profile::Span span("optimizer step");
  const absl::Status status = context_.guard.Compute("OptimStep", [&] {
    if (progress.next_part == 0) norm = loss::GradientNorm(adapter.gradient());
    fits = request.discard || loss::SquareFits(request.max_grad_norm(), norm);
    if (request.discard || !fits) return adapter.ClearGradient();
    at::Tensor next = adapter.NextWeights();
    ended = RunOptimizer(request, progress.next_part, norm, adapter, next);
    if (ended) adapter.FinishStep(std::move(next), request.optimizer());
  });
  progress.elapsed += SteadyNow() - start;
  if (status.ok() && !ended) {
    ++progress.next_part;
    optim_.emplace(step.id, progress);
    return std::nullopt;
  }
  if (!request.discard) {
    context_.probe.ObserveOptim(fits, norm, request.max_grad_norm(),
                                progress.elapsed);
  }
  if (!status.ok()) return status;
  if (!fits) return NotFinite(norm);
  return OptimStepResult{.grad_norm = norm,
                         .version = adapter.latest()->number,
                         .step = step.step,
                         .accumulated_tokens = accumulated_tokens};
}

void StepExecutor::Save(const StepTask& step,
                        const SaveCheckpointRequest& request) {
  const lora::Adapter& adapter = *context_.adapters.Find(step.adapter);
  const auto copy = std::make_shared<AdapterCopy>(
      AdapterCopy{.config = adapter.config(),
                  .last_step = step.last_step + (step.step > 0 ? 1 : 0)});
  const absl::StatusOr<AdapterInfo> owner =
      context_.dispatcher.adapters().Info(request.adapter_id);
  if (owner.ok()) copy->tenant = owner->tenant;
  const profile::Span span("copy state for a checkpoint");
  const absl::Status status = context_.guard.Guarded(
      "SaveCheckpoint", [&] { copy->state = adapter.GetState(); });
  if (!status.ok()) {
    Complete(step, status).IgnoreError();
    return;
  }
  Write(step, request, copy);
}

void StepExecutor::Write(const StepTask& step,
                         const SaveCheckpointRequest& request,
                         const std::shared_ptr<const AdapterCopy>& copy) {
  context_.PostIo(request.adapter_id, [this, step, request, copy] {
    const absl::Time start = SteadyNow();
    absl::StatusOr<CheckpointInfo> info = context_.files.Save(request, *copy);
    context_.probe.ObserveCheckpoint("save", info.ok(), SteadyNow() - start);
    context_.dispatcher.Post(
        [this, step, request, copy,
         info = std::move(info)](const absl::Status& open) mutable {
          if (!open.ok()) return;  // The step has already ended.
          const bool repeats = Repeats(
              step, info.status(), [=, this] { Write(step, request, copy); });
          if (!repeats) Complete(step, std::move(info)).IgnoreError();
        });
  });
}

bool StepExecutor::Repeats(const StepTask& step, const absl::Status& status,
                           std::function<void()> again) {
  const std::string adapter =
      context_.dispatcher.adapters().NameOf(step.adapter);
  // Nobody needs what a deleted adapter saves or loads.
  if (step.step == 0 || adapter.empty() || !IsStoreAway(context_, status)) {
    return false;
  }
  Log(LogLevel::kWarning, "a step waits: the store does not answer",
      {{"adapter", adapter},
       {"step", step.step},
       {"reason", status.message()}});
  context_.when_store_answers(
      [again = std::move(again)](const absl::Status& open) {
        if (open.ok()) again();
      });
  return true;
}

void StepExecutor::Load(const StepTask& step,
                        const LoadCheckpointRequest& request) {
  const absl::StatusOr<AdapterInfo> owner =
      context_.dispatcher.adapters().Info(request.adapter_id);
  const Durability durability =
      owner.ok() ? owner->durability : Durability::kMemory;
  context_.PostIo(request.adapter_id, [this, step, request, durability] {
    const absl::Time start = SteadyNow();
    absl::StatusOr<LoadedCheckpoint> loaded = context_.files.Load(request);
    context_.probe.ObserveCheckpoint("load", loaded.ok(), SteadyNow() - start);
    absl::StatusOr<std::string> image =
        loaded.ok() ? KeepState(context_, durability, loaded->state)
                    : loaded.status();
    context_.dispatcher.Post(
        [this, step, request, image = std::move(image),
         loaded = std::move(loaded)](const absl::Status& open) mutable {
          if (!open.ok()) return;  // The step has already ended.
          absl::Status status = image.status();
          if (Repeats(step, status, [=, this] { Load(step, request); })) {
            return;
          }
          if (status.ok()) {
            status = Install(step, request, *std::move(loaded), *image);
            if (!status.ok()) DropState(context_, *image);
          }
          if (!status.ok()) Complete(step, status).IgnoreError();
        });
  });
}

absl::Status StepExecutor::Install(const StepTask& step,
                                   const LoadCheckpointRequest& request,
                                   LoadedCheckpoint loaded,
                                   const std::string& image) {
  const lora::Adapter* adapter = context_.adapters.Find(step.adapter);
  if (adapter == nullptr) return dispatch::NoSuchAdapter(request.adapter_id);
  if (!SameShape(loaded.info.config, adapter->config())) {
    return OtherShape(request, loaded.info.config, adapter->config());
  }
  // Weights alone do not change for which optimizer the adapter is made.
  if (request.weights_only) loaded.state.optimizer = adapter->optimizer();
  return SetState(step, loaded.state, loaded.info.last_step, image);
}

absl::Status StepExecutor::SetState(const StepTask& step,
                                    const lora::AdapterState& state,
                                    uint64_t last_step,
                                    const std::string& image) {
  context_.before_change(step.adapter);
  WEFT_RETURN_IF_ERROR(context_.guard.Guarded("LoadCheckpoint", [&] {
    context_.adapters.Find(step.adapter)->SetState(state);
  }));
  log::LoadedRecord loaded{.key = step.adapter,
                           .step = step.step,
                           .file = image,
                           .optim_steps = state.optim_steps,
                           .last_step = last_step,
                           .optimizer = state.optimizer,
                           .accumulated_tokens = state.accumulated_tokens};
  if (step.kept) {
    loaded.accepted = step.id;
  } else {
    loaded.digest = *step.digest;
    loaded.request = *step.request;
  }
  context_.recorder.Write(loaded);
  context_.dispatcher.steps().Complete(step.id,
                                       AdapterInfo{.last_step = last_step},
                                       context_.adapters.Facts(step.adapter));
  return absl::OkStatus();
}

absl::StatusOr<StepResult> StepExecutor::Publish(
    const StepTask& step, const PublishSnapshotRequest& request) {
  if (!context_.adapters.Version(step.adapter, request.name).ok()) {
    WEFT_RETURN_IF_ERROR(
        context_.dispatcher.adapters().CheckBytes(step.adapter));
  }
  WEFT_ASSIGN_OR_RETURN(
      const uint64_t version,
      context_.adapters.PublishSnapshot(step.adapter, request.name));
  return PublishedSnapshot{.name = request.name, .version = version};
}

}  // namespace weft::engine
