#include "src/engine/train/batch_trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/observe/profile.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_table.h"

namespace weft::engine {
namespace {

// Divides a micro-batch of several slices. The second part has the slices of
// the adapter with the largest slice, or, if there is no other adapter, the
// last slice. So the steps of an adapter stay in order.
std::pair<dispatch::RunTrain, dispatch::RunTrain> Divide(
    const dispatch::RunTrain& train) {
  const auto& slices = train.slices;
  const auto largest =
      std::ranges::max_element(slices, {}, &StepSlice::num_tokens);
  const auto adapter_of = [](const StepSlice& slice) {
    return slice.step.adapter;
  };
  const bool several = std::ranges::any_of(slices, [&](const auto& slice) {
    return adapter_of(slice) != adapter_of(slices.front());
  });
  std::pair<dispatch::RunTrain, dispatch::RunTrain> parts;
  parts.first.backward = parts.second.backward = train.backward;
  for (const StepSlice& slice : slices) {
    const bool second = several ? adapter_of(slice) == adapter_of(*largest)
                                : &slice == &slices.back();
    (second ? parts.second : parts.first).slices.push_back(slice);
  }
  return parts;
}

// Adds the metrics of what a request took from records of samples. `version` is
// that of the weights that ran the request.
void AddReplayed(const Replayed& replayed, uint64_t version,
                 std::map<std::string, double>* metrics) {
  if (replayed == Replayed()) return;
  (*metrics)["replayed_tokens:sum"] = static_cast<double>(replayed.tokens);
  (*metrics)["records_missing:sum"] = static_cast<double>(replayed.missing);
  if (replayed.own_tokens == 0) return;
  (*metrics)["staleness:mean"] = static_cast<double>(version) -
                                 static_cast<double>(replayed.versions) /
                                     static_cast<double>(replayed.own_tokens);
}

}  // namespace

BatchTrainer::BatchTrainer(const EngineContext* context,
                           executor::Executor* executor,
                           const AdapterMover* mover)
    : context_(*context),
      teachers_(context, mover),
      runner_(executor,
              {.share_prompts = context->options.share_prompts,
               .checkpointing = context->options.gradient_checkpointing,
               .memory_budget_bytes = context->options.memory_budget_bytes}) {}

dispatch::RunTrain BatchTrainer::Runnable(const dispatch::RunTrain& train) {
  dispatch::RunTrain runnable{.backward = train.backward};
  std::map<AdapterKey, dispatch::RunTrain> later;
  for (const StepSlice& slice : train.slices) {
    const AdapterKey adapter = slice.step.adapter;
    // The steps of an adapter stay in order.
    const bool behind =
        adapter != AdapterKey::kBaseModel && later.contains(adapter);
    if (behind ||
        (!context_.recorder.replaying() && NeedsTeacher(slice.step))) {
      later[adapter].slices.push_back(slice);
      continue;
    }
    absl::Status found = VersionOf(slice.step).status();
    found.Update(FindTeacher(slice));
    if (found.ok()) {
      runnable.slices.push_back(slice);
    } else {
      Fail(slice.step, found);
    }
  }
  for (auto& [adapter, waiting] : later) {
    waiting.backward = train.backward;
    RunWithTeacher(std::move(waiting));
  }
  return runnable;
}

bool BatchTrainer::NeedsTeacher(const StepTask& step) const {
  const auto progress = progress_.find(step.id);
  const bool found =
      progress != progress_.end() && progress->second.teacher.has_value();
  return !found && teachers_.NeedsFetch(step);
}

void BatchTrainer::FetchTeacher(
    const StepTask& step,
    const std::function<void(const absl::Status&)>& done) {
  progress_.try_emplace(step.id);
  teachers_.Fetch(
      step, [this, id = step.id,
             done](const absl::StatusOr<lora::AdapterVersionPtr>& version) {
        const auto progress = progress_.find(id);
        if (version.ok() && progress != progress_.end()) {
          progress->second.fetched = *version;
        }
        done(version.status());
      });
}

void BatchTrainer::RunWithTeacher(dispatch::RunTrain train) {
  const StepTask step = train.slices.front().step;
  FetchTeacher(step, [this, step, train = std::move(train)](
                         const absl::Status& fetched) mutable {
    // Without its progress the step is gone.
    if (!fetched.ok() && progress_.contains(step.id)) {
      Fail(step, fetched);
    }
    context_.dispatcher.steps().RunLater(std::move(train));
  });
}

void BatchTrainer::Forget(uint64_t step_id) {
  progress_.erase(step_id);
  context_.recorder.Forget(step_id);
}

absl::StatusOr<lora::AdapterVersionPtr> BatchTrainer::VersionOf(
    const StepTask& step) const {
  if (step.adapter == AdapterKey::kBaseModel) return nullptr;
  return context_.adapters.Version(
      step.adapter, std::get<TrainRequest>(*step.request).snapshot);
}

absl::Status BatchTrainer::FindTeacher(const StepSlice& slice) {
  const StepTask& step = slice.step;
  if (!HasTeacher(slice.request().loss.function)) return absl::OkStatus();
  std::optional<FoundTeacher>& teacher = progress_[step.id].teacher;
  if (!teacher) {
    WEFT_ASSIGN_OR_RETURN(teacher, teachers_.Find(step));
  }
  return absl::OkStatus();
}

absl::Status BatchTrainer::Run(const dispatch::RunTrain& given) {
  dispatch::StepDesk& desk = context_.dispatcher.steps();
  const dispatch::RunTrain train = Runnable(given);
  if (train.slices.empty()) return absl::OkStatus();
  bool fits = true;
  Failures failed;
  const absl::Status status = RunSlices(train, &fits, &failed);
  if (!failed.empty()) {
    absl::Status result = failed.begin()->second;
    result.Update(Run(Others(train, failed)));
    return result;
  }
  if (!fits && train.slices.size() > 1) {
    // Only a request for which there is no memory when it runs alone may fail.
    const auto [first, second] = Divide(train);
    absl::Status result = Run(first);
    result.Update(Run(second));
    return result;
  }
  if (status.ok()) {
    desk.CountTokens(train);
    const profile::Span span("record batch");
    if (train.backward) context_.recorder.Batch(train.slices);
  }
  for (const auto& [slice, step] : train.slices) {
    if (!status.ok()) {
      Fail(step, status);
    } else if (slice.last) {
      FinishRequest(step);
    } else if (!desk.FinishSlice(step.id)) {
      Fail(step, absl::CancelledError("cancelled by the client"));
    }
  }
  return status;
}

dispatch::RunTrain BatchTrainer::Others(const dispatch::RunTrain& train,
                                        const Failures& failed) {
  dispatch::RunTrain others{.backward = train.backward};
  for (const StepSlice& slice : train.slices) {
    const auto found = failed.find(&slice.request());
    if (found != failed.end()) {
      Fail(slice.step, found->second);
    } else {
      others.slices.push_back(slice);
    }
  }
  return others;
}

void BatchTrainer::Fail(const StepTask& step, const absl::Status& status) {
  Forget(step.id);
  const absl::StatusOr<StepResult> stored = StoredResult(status);
  if (step.step > 0 && stored.ok()) context_.recorder.Done(step, *stored);
  context_.dispatcher.steps().Complete(step.id, status);
}

void BatchTrainer::FinishRequest(const StepTask& step) {
  auto node = progress_.extract(step.id);
  Progress& progress = node.mapped();
  progress.result.metrics = progress.metrics.Metrics();
  progress.result.step = step.step;
  const auto& request = std::get<TrainRequest>(*step.request);
  const absl::StatusOr<lora::AdapterVersionPtr> version = VersionOf(step);
  const bool has_version = version.ok() && *version != nullptr;
  AddReplayed(request.replayed, has_version ? (*version)->number : 0,
              &progress.result.metrics);
  const bool backward = request.backward;
  StepResult result = std::move(progress.result);
  // Records the step only if it is a Forward with a step number. A step with
  // gradients is already in the log, batch by batch. A Forward without a step
  // number changes nothing that must be recorded.
  if (!backward && step.step > 0) context_.recorder.Done(step, result);
  context_.dispatcher.steps().Complete(step.id, std::move(result));
}

struct BatchTrainer::MicroBatch {
  // An adapter with gradients from the batch. The adapter's scratch collects
  // the gradients of a request until the request's last slice.
  struct Touched {
    lora::Adapter* adapter;
    bool fresh;          // This is the request's first slice.
    bool complete;       // This is the request's last slice.
    int64_t num_tokens;  // Of the request, and of those behind it.
    // The scratch before this batch. Set if may_run_again and not `fresh`.
    at::Tensor before_N;
  };
  bool backward = false;
  // If memory runs out, the batch may run again with all layers recomputed, or
  // in parts. These need copies of the scratch, which take memory, so otherwise
  // a single slice on a CPU runs only once.
  bool may_recompute = false;
  bool may_run_again = false;
  bool ran = false;   // The last attempt began to run the batch.
  bool plans = true;  // The last attempt found a plan within the budget.
  std::vector<TrainPiece> pieces;
  std::map<lora::AdapterVersionPtr, int64_t> copy_bytes;  // By teacher.
  std::vector<loss::MetricSums> metrics;  // Of earlier slices, by piece.
  std::vector<Touched> touched;
  lora::LoraGradients gradients;  // The scratch gradients of `touched`.
  int64_t num_tokens = 0;
};

BatchTrainer::MicroBatch BatchTrainer::MakeMicroBatch(
    const dispatch::RunTrain& train) {
  MicroBatch batch{.backward = train.backward,
                   .may_recompute = context_.device.Memory().total > 0 &&
                                    context_.options.gradient_checkpointing ==
                                        GradientCheckpointing::kAuto};
  batch.may_run_again = batch.may_recompute || train.slices.size() > 1;
  for (const StepSlice& part : train.slices) {
    const auto& [slice, step] = part;
    const Progress& progress = progress_[step.id];
    TrainPiece piece{.request = &part.request(),
                     .first_datum = slice.first_datum,
                     .num_data = slice.num_data};
    piece.version = *VersionOf(step);
    if (progress.teacher) {
      piece.teacher = progress.teacher->version;
      batch.copy_bytes[piece.teacher] = progress.teacher->copy_bytes;
    }
    if (lora::Adapter* adapter = context_.adapters.Find(step.adapter)) {
      const bool known =
          !batch.touched.empty() && batch.touched.back().adapter == adapter;
      if (train.backward && known) {
        // The batch has several whole requests of the adapter.
        batch.touched.back().num_tokens += part.request().num_tokens();
      } else if (train.backward) {
        // A request's first slice clears the scratch. A later slice adds to the
        // gradients of the earlier ones.
        batch.touched.push_back({.adapter = adapter,
                                 .fresh = slice.first_datum == 0,
                                 .complete = slice.last,
                                 .num_tokens = part.request().num_tokens()});
        batch.gradients.push_back(
            {.version = piece.version, .gradient_N = adapter->scratch()});
      }
    }
    batch.num_tokens += part.num_tokens();
    batch.pieces.push_back(std::move(piece));
    batch.metrics.push_back(progress.metrics);
  }
  return batch;
}

void BatchTrainer::CopyTeachers(MicroBatch& batch) const {
  std::map<lora::AdapterVersionPtr, lora::AdapterVersionPtr> copies;
  for (TrainPiece& piece : batch.pieces) {
    if (piece.teacher == nullptr) continue;
    lora::AdapterVersionPtr& copy = copies[piece.teacher];
    if (copy == nullptr) copy = context_.adapters.OnDevice(piece.teacher);
    piece.teacher = copy;
  }
}

absl::StatusOr<TrainOutcome> BatchTrainer::TryBatch(MicroBatch& batch,
                                                    Recompute recompute) {
  absl::StatusOr<TrainOutcome> outcome = absl::InternalError("not run");
  int64_t copy_bytes = 0;
  for (const auto& [teacher, bytes] : batch.copy_bytes) copy_bytes += bytes;
  batch.ran = false;
  WEFT_RETURN_IF_ERROR(context_.guard.Compute(
      batch.backward ? "ForwardBackward" : "Forward", [&] {
        for (MicroBatch::Touched& touched : batch.touched) {
          if (touched.fresh) {
            touched.adapter->ClearScratch();
          } else if (touched.before_N.defined()) {
            touched.adapter->scratch().copy_(touched.before_N);
          } else if (batch.may_run_again) {
            touched.before_N = touched.adapter->scratch().clone();
          }
        }
        CopyTeachers(batch);
        batch.ran = true;
        outcome = runner_.Run(batch.pieces,
                              batch.backward ? &batch.gradients : nullptr,
                              batch.metrics, recompute, copy_bytes);
        batch.plans = !absl::IsResourceExhausted(outcome.status());
        const profile::Span span("wait for the device");
        context_.device.Wait();
      }));
  return outcome;
}

absl::StatusOr<TrainOutcome> BatchTrainer::RunWithinMemory(MicroBatch& batch,
                                                           bool* fits) {
  absl::StatusOr<TrainOutcome> outcome = TryBatch(batch, Recompute::kByBudget);
  *fits = !absl::IsResourceExhausted(outcome.status());
  if (*fits || !batch.plans) return outcome;
  context_.probe.CountOutOfMemory();
  if (batch.may_recompute && context_.guard.failure().ok() && batch.ran &&
      runner_.kept_layers()) {
    Log(LogLevel::kWarning,
        "a micro-batch runs once more, with all layers recomputed",
        {{"tokens", batch.num_tokens}});
    outcome = TryBatch(batch, Recompute::kAll);
    *fits = !absl::IsResourceExhausted(outcome.status());
    if (*fits) return outcome;
  }
  // Parts of the batch may run, and add to the scratch as it was.
  for (const MicroBatch::Touched& touched : batch.touched) {
    if (!touched.before_N.defined()) continue;
    const absl::Status restored = context_.guard.Compute(
        "restoring gradients",
        [&] { touched.adapter->scratch().copy_(touched.before_N); });
    if (!restored.ok()) {
      *fits = true;  // Parts would add to a scratch that nobody knows.
      return restored;
    }
  }
  return outcome;
}

absl::Status BatchTrainer::RunSlices(const dispatch::RunTrain& train,
                                     bool* fits, Failures* failed) {
  MicroBatch batch = MakeMicroBatch(train);
  const absl::Time start = SteadyNow();
  absl::StatusOr<TrainOutcome> outcome = RunWithinMemory(batch, fits);
  if (!*fits) return outcome.status();
  context_.probe.ObserveTrain(train.backward, batch.num_tokens,
                              SteadyNow() - start);
  WEFT_RETURN_IF_ERROR(outcome.status());
  for (const StepSlice& slice : train.slices) {
    const auto time = outcome->loss_time.find(&slice.request());
    if (time == outcome->loss_time.end()) continue;
    context_.dispatcher.steps().ChargeTime(slice.step, time->second);
  }
  *failed = std::move(outcome->failed);
  if (!failed->empty()) return absl::OkStatus();
  if (const at::Tensor& rows_LE = outcome->expert_rows_LE; rows_LE.defined()) {
    context_.probe.ObserveExperts({rows_LE.const_data_ptr<int64_t>(),
                                   static_cast<size_t>(rows_LE.numel())},
                                  static_cast<size_t>(rows_LE.size(1)));
  }
  if (train.backward) {
    for (const auto& [slice, step] : train.slices) {
      context_.before_change(step.adapter);
    }
  }
  WEFT_RETURN_IF_ERROR(context_.guard.Compute("adding gradients", [&] {
    const profile::Span span("add gradients");
    for (const MicroBatch::Touched& touched : batch.touched) {
      if (touched.complete) touched.adapter->CommitScratch(touched.num_tokens);
    }
  }));

  auto next = outcome->data.begin();
  for (size_t i = 0; i < train.slices.size(); ++i) {
    const auto& [slice, step] = train.slices[i];
    Progress& progress = progress_[step.id];
    progress.metrics = std::move(outcome->metrics[i]);
    const auto end = next + slice.num_data;
    std::move(next, end, std::back_inserter(progress.result.data));
    next = end;
  }
  return absl::OkStatus();
}

}  // namespace weft::engine
