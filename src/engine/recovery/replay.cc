// The functions of LogReplay that apply each kind of record.
#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/adapters/state_image.h"
#include "src/engine/recovery/log_replay.h"
#include "src/engine/recovery/restore_adapter.h"

namespace weft::engine {
namespace {

// Compares bits, because NaN does not equal NaN.
bool SameBits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

// Returns whether two results of an optimizer step are equal. Returns true for
// other kinds of steps, because their results have no computed numbers.
bool SameResult(const StepResult& a, const StepResult& b) {
  const auto* optim = std::get_if<OptimStepResult>(&a);
  if (optim == nullptr) return true;
  const auto& other = std::get<OptimStepResult>(b);
  return optim->version == other.version &&
         SameBits(optim->grad_norm, other.grad_norm);
}

// Describes how a step ended, for a message.
std::string EndOf(const absl::StatusOr<StepResult>& result) {
  if (!result.ok()) return result.status().ToString();
  const auto* failure = std::get_if<StepFailure>(&*result);
  return failure == nullptr ? "OK" : failure->status.ToString();
}

}  // namespace

void LogReplay::Apply(log::StoredAdapter& adapter, const Next& next) {
  if (adapter.image) {
    context_.recorder.AddImage(adapter.image->file, /*recorded=*/true);
    const absl::Status restored =
        RestoreFromImage(context_, adapter, &snapshots_);
    if (restored.ok()) ++report_.adapters;
    return Pass(
        restored, [this, adapter, next]() mutable { Apply(adapter, next); },
        next);
  }
  ++report_.adapters;
  context_.dispatcher.adapters().WhenSlot(
      [this, adapter = std::move(adapter), next](const absl::Status& room) {
        used_device_ = true;
        next(room.ok() ? manager_.MakeAgain(adapter) : room);
      });
}

void LogReplay::Apply(log::RemovedRecord& removed, const Next& next) {
  GiveUpIf([&](AdapterKey key) { return key == removed.key; });
  std::erase_if(accepted_, [&](const auto& entry) {
    return entry.second.key == removed.key;
  });
  if (!context_.dispatcher.adapters().NameOf(removed.key).empty()) {
    manager_.Remove(removed.key);
  }
  next(absl::OkStatus());
}

void LogReplay::Apply(log::BeginRecord& begin, const Next& next) {
  begun_[begin.work].step = context_.dispatcher.recovery().BeginStep(
      begin.key, begin.step, std::move(begin.digest), std::move(begin.request));
  next(absl::OkStatus());
}

void LogReplay::Apply(log::AcceptedRecord& accepted, const Next& next) {
  accepted_.emplace(accepted.work, std::move(accepted));
  next(absl::OkStatus());
}

void LogReplay::BeginAccepted(uint64_t work) {
  const auto step = accepted_.find(work);
  if (step == accepted_.end() || begun_.contains(work) ||
      !step->second.request) {
    return;
  }
  // A copy, because the step may begin again.
  const log::AcceptedRecord& accepted = step->second;
  begun_[work].step = context_.dispatcher.recovery().BeginStep(
      accepted.key, accepted.step, accepted.digest, *accepted.request);
}

void LogReplay::Apply(log::GivenUpRecord& given_up, const Next& next) {
  const auto begun = begun_.find(given_up.work);
  if (begun != begun_.end()) GiveUp(begun);
  next(absl::OkStatus());
}

void LogReplay::GiveUp(BegunRequests::iterator begun) {
  const StepTask step = begun->second.step;
  begun_.erase(begun);
  trainer_.Forget(step.id);
  context_.dispatcher.recovery().AbandonStep(step.id);
  Unpin(step.adapter);
}

void LogReplay::GiveUpIf(const std::function<bool(AdapterKey)>& applies) {
  for (auto next = begun_.begin(); next != begun_.end();) {
    const auto begun = next++;
    if (applies(begun->second.step.adapter)) GiveUp(begun);
  }
}

void LogReplay::Unpin(AdapterKey key) {
  const bool busy = std::ranges::any_of(begun_, [key](const auto& entry) {
    return entry.second.between_slices && entry.second.step.adapter == key;
  });
  if (!busy) context_.dispatcher.recovery().Pin(key, false);
}

void LogReplay::Apply(log::BatchRecord& batch, const Next& next) {
  std::vector<AdapterKey> keys;
  for (const TrainSlice& slice : batch.slices) {
    BeginAccepted(slice.work_id);
    const auto step = begun_.find(slice.work_id);
    if (step == begun_.end()) {
      next(absl::DataLossError(absl::StrCat(
          "a batch names request ", slice.work_id, ", which has not begun")));
      return;
    }
    keys.push_back(step->second.step.adapter);
  }
  FetchTeachers(batch, 0,
                [this, keys, batch, next](const absl::Status& status) {
                  if (!status.ok()) return next(status);
                  WithAdapters(
                      keys, [this, batch] { return RunBatch(batch); }, next);
                });
}

absl::Status LogReplay::RunBatch(const log::BatchRecord& batch) {
  dispatch::RunTrain train{.backward = true, .slices = {}};
  for (TrainSlice slice : batch.slices) {
    const auto begun = begun_.find(slice.work_id);
    const StepTask step = begun->second.step;
    begun->second.between_slices = true;
    if (slice.last) {
      begun_.erase(begun);
      accepted_.erase(slice.work_id);
    }
    slice.work_id = step.id;
    train.slices.push_back({slice, step});
  }
  const absl::Status status = trainer_.Run(train);
  if (status.ok()) return status;
  return absl::InternalError(absl::StrCat(
      "a batch that succeeded once fails now: ", status.message(),
      " (its first step is ", train.slices.front().step.step, " of adapter '",
      NameOf(train.slices.front().step.adapter), "')"));
}

void LogReplay::Apply(log::DoneRecord& done, const Next& next) {
  if (auto accepted = accepted_.extract(done.accepted)) {
    done.digest = std::move(accepted.mapped().digest);
    if (done.again) done.request = std::move(accepted.mapped().request);
  }
  if (!done.request) {
    context_.dispatcher.recovery().AddReply(
        done.key,
        {.step = done.step,
         .digest = std::move(done.digest),
         .result = std::make_shared<const StepResult>(std::move(done.result))});
    next(absl::OkStatus());
    return;
  }
  const AdapterKey key = done.key;
  WithAdapters(
      {key}, [this, done = std::move(done)] { return RunAgain(done); }, next);
}

absl::Status LogReplay::RunAgain(const log::DoneRecord& done) {
  dispatch::RecoveryDesk& desk = context_.dispatcher.recovery();
  if (context_.adapters.Find(done.key) == nullptr) return absl::OkStatus();
  const absl::StatusOr<StepResult> result = steps_.RunNow(
      desk.BeginStep(done.key, done.step, done.digest, *done.request));
  if (!result.ok() || result->index() != done.result.index()) {
    return absl::InternalError(
        absl::StrCat("step ", done.step, " of adapter '", NameOf(done.key),
                     "' ends otherwise than it did: ", EndOf(result),
                     ", it was ", EndOf(done.result)));
  }
  if (!SameResult(*result, done.result)) {
    ++report_.mismatches;
    Log(LogLevel::kWarning, "a step has another result than it had",
        {{"adapter", NameOf(done.key)}, {"step", done.step}});
  }
  return absl::OkStatus();
}

void LogReplay::Apply(log::LoadedRecord& loaded, const Next& next) {
  const AdapterKey key = loaded.key;
  if (auto accepted = accepted_.extract(loaded.accepted)) {
    loaded.digest = std::move(accepted.mapped().digest);
    loaded.request = std::move(accepted.mapped().request);
  }
  if (!loaded.request) {
    return next(absl::DataLossError("a load in the log has no request"));
  }
  context_.recorder.AddImage(loaded.file, /*recorded=*/true);
  WithAdapters(
      {key},
      [this, loaded]() -> absl::Status {
        const lora::Adapter* adapter = context_.adapters.Find(loaded.key);
        if (adapter == nullptr) return absl::OkStatus();
        WEFT_ASSIGN_OR_RETURN(lora::AdapterState state,
                              ReadState(*context_.state, loaded.file,
                                        adapter->layout().num_parameters()));
        state.optim_steps = loaded.optim_steps;
        state.optimizer = loaded.optimizer;
        state.accumulated_tokens = loaded.accumulated_tokens;
        return steps_.SetState(
            context_.dispatcher.recovery().BeginStep(
                loaded.key, loaded.step, loaded.digest, *loaded.request),
            state, loaded.last_step, loaded.file);
      },
      [this, loaded, next](const absl::Status& status) {
        Pass(
            status, [this, loaded, next]() mutable { Apply(loaded, next); },
            next);
      });
}

void LogReplay::Apply(log::ReleaseRecord& release, const Next& next) {
  context_.before_change(release.key);
  const absl::Status status =
      context_.adapters.ReleaseSnapshot(release.key, release.name);
  if (status.ok()) context_.Publish(release.key);
  next(status);
}

// The recorder has the notes from the start (LogSummary).
void LogReplay::Apply(log::NoteRecord& /*note*/, const Next& next) {
  next(absl::OkStatus());
}

void LogReplay::Apply(log::ArrivingRecord& arriving, const Next& next) {
  for (const log::StoredAdapter& adapter : arriving.adapters) {
    context_.recorder.AddImage(adapter.image->file, /*recorded=*/true);
  }
  moves_.arriving[arriving.unit] = std::move(arriving);
  next(absl::OkStatus());
}

void LogReplay::Apply(log::MoveRecord& move, const Next& next) {
  using enum log::MoveStage;
  auto arriving = moves_.arriving.extract(move.unit);
  if (move.stage == kOwn) {
    return Arrive(std::move(arriving.mapped().adapters), next);
  }
  if (move.stage == kLeft) {
    for (const auto& [key, info] :
         context_.dispatcher.recovery().AdaptersOf(move.unit)) {
      log::RemovedRecord removed{.key = key};
      Apply(removed, [](const absl::Status& /*ok*/) {});
    }
  }
  moves_.leaving.erase(move.unit);
  if (move.stage == kLeaving) moves_.leaving[move.unit] = std::move(move);
  next(absl::OkStatus());
}

void LogReplay::Arrive(std::vector<log::StoredAdapter> adapters,
                       const Next& next) {
  if (adapters.empty()) return next(absl::OkStatus());
  log::StoredAdapter adapter = std::move(adapters.back());
  adapters.pop_back();
  Apply(adapter, [this, adapters = std::move(adapters),
                  next](const absl::Status& status) {
    status.ok() ? Arrive(adapters, next) : next(status);
  });
}

void LogReplay::Apply(log::SettingsRecord& record, const Next& next) {
  if (record.settings != settings_ && record.settings != other_settings_) {
    other_settings_ = record.settings;
    Log(LogLevel::kWarning,
        "the log was written under other settings: its numbers may come out "
        "otherwise in their last bits",
        {{"then", record.settings}, {"now", settings_}});
  }
  next(absl::OkStatus());
}

}  // namespace weft::engine
