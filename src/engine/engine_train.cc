// Training micro-batches: a plan's slices to pieces, and results to requests.
#include <ATen/ATen.h>

#include <memory>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"
#include "src/engine/engine_impl.h"

namespace weft::engine {

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

struct EngineImpl::MicroBatch {
  // An adapter whose scratch collects gradients of the batch.
  struct Touched {
    lora::Adapter* adapter;
    bool fresh;           // Nothing of its request has run yet.
    bool complete;        // Nothing of it is left then.
    at::Tensor before_N;  // The scratch before, unless fresh.
  };
  bool backward = false;
  bool ran = false;  // The last try got as far as that.
  std::vector<TrainPiece> pieces;
  std::vector<loss::MetricSums*> metrics;
  std::vector<Touched> touched;
  int64_t num_tokens = 0;
};

EngineImpl::MicroBatch EngineImpl::MakeMicroBatch(
    const sched::Plan& plan, const std::vector<const StepWork*>& works) {
  MicroBatch batch{.backward = plan.backward};
  for (size_t i = 0; i < plan.slices.size(); ++i) {
    const sched::TrainSlice& slice = plan.slices[i];
    const auto& request = std::get<TrainRequest>(works[i]->request);
    TrainPiece piece{.request = &request,
                     .first_datum = slice.first_datum,
                     .num_data = slice.num_data};
    if (lora::Adapter* adapter = adapters_.Find(request.adapter_id)) {
      piece.version = adapter->latest();
      if (plan.backward) {
        if (batch.touched.empty() || batch.touched.back().adapter != adapter) {
          // A slice that continues a request adds to what its earlier ones
          // left.
          batch.touched.push_back({.adapter = adapter,
                                   .fresh = slice.first_datum == 0,
                                   .complete = slice.last});
        }
        piece.gradient_N = adapter->scratch();
      }
    }
    for (int64_t d = 0; d < slice.num_data; ++d) {
      batch.num_tokens += request.data[slice.first_datum + d].num_tokens();
    }
    batch.pieces.push_back(std::move(piece));
    batch.metrics.push_back(&progress_[slice.work_id].metrics);
  }
  return batch;
}

absl::StatusOr<TrainOutcome> EngineImpl::TryBatch(MicroBatch& batch,
                                                  Recompute recompute) {
  absl::StatusOr<TrainOutcome> outcome = absl::InternalError("not run");
  batch.ran = false;
  // On the host a batch that needs too much ends otherwise than by an error
  // that one could try again after.
  const bool may_retry =
      parts_.device->Memory().total > 0 &&
      parts_.options.gradient_checkpointing == GradientCheckpointing::kAuto;
  WEFT_RETURN_IF_ERROR(
      Compute(batch.backward ? "ForwardBackward" : "Forward", [&] {
        for (MicroBatch::Touched& touched : batch.touched) {
          if (touched.fresh) {
            touched.adapter->ClearScratch();
          } else if (touched.before_N.defined()) {
            touched.adapter->scratch().copy_(touched.before_N);
          } else if (may_retry) {
            touched.before_N = touched.adapter->scratch().clone();
          }
        }
        batch.ran = true;
        outcome = train_runner_.Run(batch.pieces, batch.backward, batch.metrics,
                                    recompute);
        parts_.device->Wait();
      }));
  return outcome;
}

absl::Status EngineImpl::RunTrainPieces(
    const sched::Plan& plan, const std::vector<const StepWork*>& works) {
  MicroBatch batch = MakeMicroBatch(plan, works);
  std::vector<loss::MetricSums> metrics_before;
  for (const loss::MetricSums* sums : batch.metrics) {
    metrics_before.push_back(*sums);
  }
  const absl::Time start = absl::Now();
  absl::StatusOr<TrainOutcome> outcome = TryBatch(batch, Recompute::kByBudget);
  if (absl::IsResourceExhausted(outcome.status()) && failure().ok() &&
      batch.ran && train_runner_.kept_layers()) {
    Log(LogLevel::kWarning,
        "a micro-batch runs once more, with all layers recomputed",
        {{"tokens", batch.num_tokens}});
    for (size_t i = 0; i < batch.metrics.size(); ++i) {
      *batch.metrics[i] = metrics_before[i];
    }
    outcome = TryBatch(batch, Recompute::kAll);
  }
  probe_.ObserveTrain(plan.backward, batch.num_tokens, absl::Now() - start);
  WEFT_RETURN_IF_ERROR(outcome.status());
  WEFT_RETURN_IF_ERROR(Compute("adding gradients", [&] {
    for (const MicroBatch::Touched& touched : batch.touched) {
      if (touched.complete) touched.adapter->CommitScratch();
    }
  }));

  size_t next = 0;
  for (const sched::TrainSlice& slice : plan.slices) {
    std::vector<DatumResult>& data = progress_[slice.work_id].result.data;
    for (int64_t d = 0; d < slice.num_data; ++d) {
      data.push_back(std::move(outcome->data[next++]));
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::engine
