#include "server/tinker/step_order.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/status_conversion.h"
#include "server/tinker/errors.h"
#include "server/tinker/models.h"

namespace weft::tinker {
namespace {

// At most this many steps of one model are in the engine at a time. A few steps
// keep the engine busy. More steps would fill the queue that all tenants share.
constexpr size_t kMaxRunning = 64;
// The ledger keeps the requests of this many finished steps of a model. The
// ledger needs no more requests, because the dispatcher keeps the replies of
// only 64 steps (kReplayWindow).
constexpr int64_t kKeptSteps = 64;
// No checkpoint can have this name, so a load of it changes nothing.
constexpr absl::string_view kNoCheckpoint = "~";

using Result = absl::StatusOr<FutureResult>;

void Advance(Front& front, const std::string& id);

Model* FindModel(Front& front, const std::string& id) {
  const auto found = front.models.find(id);
  return found == front.models.end() ? nullptr : &found->second;
}

void Finish(Front& front, const std::string& future, Result result) {
  front.futures.Finish(future, result.ok()
                                   ? *std::move(result)
                                   : FutureResult::Failed(result.status()));
}

void AdvanceLater(Front& front, Model& model) {
  if (std::exchange(model.line.retries, true)) return;
  front.after(kRetryPause, [&front, id = model.id] {
    Model* const later = FindModel(front, id);
    if (later == nullptr) return;
    later->line.retries = false;
    Advance(front, id);
  });
}

// Returns true if the engine still waits for the number of a step that has
// failed with `status`. kStepDonePayload, ALREADY_EXISTS and OUT_OF_RANGE mean
// that the engine already has the number. After NOT_FOUND (the adapter is gone)
// and UNAVAILABLE (the server stops), nothing waits for the number.
bool LeavesGap(const absl::Status& status) {
  return !status.GetPayload(kStepDonePayload) && !absl::IsNotFound(status) &&
         !absl::IsAlreadyExists(status) && !absl::IsOutOfRange(status) &&
         !absl::IsUnavailable(status);
}

// Returns true if the engine had queued the step, and then gave the step's
// place to work that can run sooner. The step did not run.
bool GavePlace(const absl::Status& status) {
  return absl::IsResourceExhausted(status) && RetryMillis(status).has_value();
}

// Removes a step from the line, and lets the steps after it begin. Call it when
// the engine does not wait for the step's number.
void Leave(Front& front, Model& model, int64_t seq) {
  StepLine& line = model.line;
  line.running.erase(seq);
  front.ledger->Erase(EntryKind::kStep,
                      absl::StrCat(model.id, ":", seq - kKeptSteps));
  if (line.loading != seq) return Advance(front, model.id);
  if (HasLoaded(model, seq)) return OpenLine(front, model.id);
  // The load has failed. If begun_load kept its value, a restart would drop the
  // steps before the load (LatestLoad).
  model.begun_load = 0;
  KeepModel(front, model,
            [&front, id = model.id](const absl::Status& /*kept*/) {
              OpenLine(front, id);
            });
}

// Gives the number of the failed step `seq` to a step that does nothing, so
// that the steps after `seq` can run. `number` is the number of the adapter's
// step.
void FillStep(Front& front, const std::string& id, int64_t seq,
              uint64_t number) {
  Model* const model = FindModel(front, id);
  if (model == nullptr || !model->line.running.contains(seq)) return;
  LoadCheckpointRequest nothing;
  nothing.adapter_id = model->adapter;
  nothing.source_adapter_id = model->adapter;
  nothing.name = std::string(kNoCheckpoint);
  nothing.step = number;
  const auto end = [&front, id, seq, number](const absl::Status& status) {
    Model* const later = FindModel(front, id);
    if (later == nullptr) return;
    if (absl::IsUnavailable(status)) return;  // The server is stopping.
    if (status.ok() || !LeavesGap(status)) return Leave(front, *later, seq);
    front.after(kRetryPause, [&front, id, seq, number] {
      FillStep(front, id, seq, number);
    });
  };
  const absl::Status refused = front.port.CallUnmetered<StepReply<AdapterInfo>>(
      model->line.running.at(seq).step.origin, Rpc::kLoadCheckpoint,
      std::move(nothing),
      [](Engine& engine, LoadCheckpointRequest plain, auto done) {
        engine.LoadCheckpoint(std::move(plain), std::move(done));
      },
      [end](const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        end(reply.status());
      });
  if (!refused.ok()) end(refused);
}

// Handles the end of a step. `number` is the number of the adapter's step.
void End(Front& front, const std::string& id, int64_t seq, uint64_t number,
         Result result) {
  Model* const model = FindModel(front, id);
  if (model == nullptr) return;  // ForgetModel has finished the future.
  // UNAVAILABLE means that the server stops. The future then gets no result,
  // because the restarted server runs the step again.
  if (absl::IsUnavailable(result.status()) && front.ledger->keeps()) return;
  StepLine& line = model->line;
  const auto running = line.running.find(seq);
  if (running == line.running.end()) return;
  if (GavePlace(result.status())) {
    line.arrived.emplace(seq, std::move(running->second.step));
    line.running.erase(running);
    line.next = std::min(line.next, seq);
    return AdvanceLater(front, *model);
  }
  const bool gap = !result.ok() && LeavesGap(result.status());
  Finish(front, running->second.step.future, std::move(result));
  if (gap) return FillStep(front, id, seq, number);
  Leave(front, *model, seq);
}

// Gives a step to the engine. Returns an error only if the step may succeed
// later; any other error ends the step.
absl::Status Run(Front& front, Model& model, int64_t seq,
                 const ArrivedStep& step) {
  const uint64_t number = model.StepOf(seq);
  RunningStep& running = model.line.running[seq];
  running.step = step;
  const std::shared_ptr<CancelHandle> cancel = running.cancel;
  const absl::Status refused =
      step.task({.number = number,
                 .done =
                     [&front, id = model.id, seq, number](Result result) {
                       End(front, id, seq, number, std::move(result));
                     },
                 .cancel = cancel.get()});
  if (refused.ok()) return refused;
  if (RetryMillis(refused).has_value()) {
    model.line.running.erase(seq);
    return refused;
  }
  End(front, model.id, seq, number, refused);
  return absl::OkStatus();
}

void RunLoad(Front& front, const std::string& id, int64_t seq,
             const ArrivedStep& step) {
  Model* const model = FindModel(front, id);
  if (model == nullptr || Run(front, *model, seq, step).ok()) return;
  front.after(kRetryPause,
              [&front, id, seq, step] { RunLoad(front, id, seq, step); });
}

// Records on disk that the load has begun, and then starts the load. So after a
// restart, no step from before the load can change the loaded weights.
void BeginLoad(Front& front, Model& model, int64_t seq, ArrivedStep step) {
  model.line.loading = seq;
  model.begun_load = seq;
  KeepModel(front, model,
            [&front, id = model.id, seq,
             step = std::move(step)](const absl::Status& kept) {
              Model* const later = FindModel(front, id);
              if (later == nullptr) return;
              if (kept.ok()) return RunLoad(front, id, seq, step);
              later->line.running[seq].step = step;
              End(front, id, seq, later->StepOf(seq), kept);
            });
}

// Gives the engine the model's next steps in order. Stops at a step that has
// not arrived or must wait.
void Advance(Front& front, const std::string& id) {
  Model* const model = FindModel(front, id);
  if (model == nullptr || model->line.advances) return;
  StepLine& line = model->line;
  line.advances = true;
  while (!line.loading && line.running.size() < kMaxRunning) {
    const int64_t seq = line.next;
    const auto next = line.arrived.find(seq);
    if (next == line.arrived.end()) break;
    if (next->second.is_load && !line.running.empty()) break;
    ArrivedStep step = std::move(next->second);
    line.arrived.erase(next);
    ++line.next;
    if (step.is_load) {
      BeginLoad(front, *model, seq, std::move(step));
    } else if (!Run(front, *model, seq, step).ok()) {
      line.arrived.emplace(seq, std::move(step));
      line.next = seq;
      AdvanceLater(front, *model);
      break;
    }
  }
  line.advances = false;
}

// Gives the engine a step whose number it already has, to get the stored reply.
// No later step waits for this step.
void RunAgain(Front& front, const std::string& id, int64_t seq,
              const ArrivedStep& step) {
  Model* const model = FindModel(front, id);
  if (model == nullptr) return;
  const auto later = [&front, id, seq, step] {
    front.after(kRetryPause,
                [&front, id, seq, step] { RunAgain(front, id, seq, step); });
  };
  const auto finish = [&front, future = step.future, later](Result result) {
    if (GavePlace(result.status())) return later();
    Finish(front, future, std::move(result));
  };
  const absl::Status refused = step.task(
      {.number = model->StepOf(seq), .done = finish, .cancel = nullptr});
  if (refused.ok()) return;
  if (!RetryMillis(refused).has_value()) return finish(refused);
  later();
}

}  // namespace

void EnterStep(Front& front, const std::string& model_id, int64_t seq,
               ArrivedStep step) {
  Model* const model = FindModel(front, model_id);
  if (model == nullptr) {
    return Finish(front, step.future, absl::NotFoundError("the model is gone"));
  }
  if (seq < model->line.next) return RunAgain(front, model_id, seq, step);
  model->line.arrived.emplace(seq, std::move(step));
  Advance(front, model_id);
}

void OpenLine(Front& front, const std::string& id) {
  Model* const model = FindModel(front, id);
  if (model == nullptr) return;
  model->line.loading.reset();
  Advance(front, id);
}

void NoteLoad(Front& front, Model& model, int64_t seq, uint64_t last_step,
              const std::function<void(absl::Status)>& done) {
  if (!HasLoaded(model, seq)) {
    model.offsets.emplace_back(seq + 1, static_cast<int64_t>(last_step) - seq);
  }
  // Only the latest load and the steps after it can still run (LatestLoad), so
  // two offsets are enough. The last offset applies to the steps after the
  // load. The offset before the last applies to the load itself.
  if (model.offsets.size() > 2) model.offsets.erase(model.offsets.begin());
  model.begun_load = 0;
  KeepModel(front, model, done);
}

bool HasLoaded(const Model& model, int64_t seq) {
  return std::ranges::any_of(model.offsets, [seq](const auto& offset) {
    return offset.first == seq + 1;
  });
}

int64_t LatestLoad(const Model& model) {
  const int64_t noted =
      model.offsets.empty() ? 0 : model.offsets.back().first - 1;
  return std::max(noted, model.begun_load);
}

}  // namespace weft::tinker
