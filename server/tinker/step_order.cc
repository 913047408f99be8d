#include "server/tinker/step_order.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/status_conversion.h"

namespace weft::tinker {
namespace {

// At most this many steps of one model are in the engine at a time. A few steps
// keep the engine busy. More steps would fill the queue that all tenants share.
constexpr size_t kMaxRunning = 64;

using Result = absl::StatusOr<FutureResult>;

void Advance(Front& front, const std::string& id);

Model* FindModel(Front& front, const std::string& id) {
  const auto found = front.models.find(id);
  return found == front.models.end() ? nullptr : &found->second;
}

// Ends a step's future. The ledger forgets the request, because the engine has
// stored the result (Retrieve).
void Finish(Front& front, const std::string& future, Result result) {
  front.ledger.Erase(EntryKind::kStep, future);
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

// Returns true if the engine has not accepted the step that failed with
// `status`. kStepDonePayload, ALREADY_EXISTS and OUT_OF_RANGE mean that the
// engine has the number. After NOT_FOUND (the adapter is gone) and UNAVAILABLE
// (the server stops), nothing waits for the number.
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

// Returns true if the step has no result, because the server stops and the
// restarted server runs it again.
bool ServerStops(const Front& front, const absl::Status& status) {
  return absl::IsUnavailable(status) && front.ledger.keeps();
}

// Ends a step that has a result, and lets the steps after it begin.
void Leave(Front& front, Model& model, int64_t seq, Result result) {
  const auto running = model.line.running.extract(seq);
  if (running.empty()) return;
  Finish(front, running.mapped().step.future, std::move(result));
  Advance(front, model.id);
}

// Has the engine accept a step whose request was refused with `status`, so that
// the step fails in its turn and the steps after it can run.
void RefuseStep(Front& front, const std::string& id, int64_t seq,
                const absl::Status& status) {
  Model* const model = FindModel(front, id);
  if (model == nullptr || !model->line.running.contains(seq)) return;
  const CallOrigin& origin = model->line.running.at(seq).step.origin;
  front.port.RefuseStep(
      origin,
      {.adapter_id = model->adapter,
       .step = static_cast<uint64_t>(seq),
       .digest = absl::StrCat("refused: ", status.ToString()),
       .status = status},
      [&front, id, seq, status](const absl::Status& refused) {
        Model* const later = FindModel(front, id);
        if (later == nullptr) return;
        if (absl::IsUnavailable(refused)) return;  // The server is stopping.
        // FAILED_PRECONDITION: the number is in the past.
        if (!LeavesGap(refused) || absl::IsFailedPrecondition(refused))
          return Leave(front, *later, seq, status);
        front.after(kRetryPause, [&front, id, seq, status] {
          RefuseStep(front, id, seq, status);
        });
      });
}

void End(Front& front, const std::string& id, int64_t seq, Result result) {
  Model* const model = FindModel(front, id);
  if (model == nullptr) return;  // ForgetModel has finished the future.
  if (ServerStops(front, result.status())) return;
  StepLine& line = model->line;
  const auto running = line.running.find(seq);
  if (running == line.running.end()) return;
  if (GavePlace(result.status())) {
    line.arrived.emplace(seq, std::move(running->second.step));
    line.running.erase(running);
    line.next = std::min(line.next, seq);
    return AdvanceLater(front, *model);
  }
  if (!result.ok() && LeavesGap(result.status())) {
    return RefuseStep(front, id, seq, result.status());
  }
  Leave(front, *model, seq, std::move(result));
}

// Gives a step to the engine. Returns an error only if the step may succeed
// later; any other error ends the step.
absl::Status Run(Front& front, Model& model, int64_t seq,
                 const ArrivedStep& step) {
  RunningStep& running = model.line.running[seq];
  running.step = step;
  const std::shared_ptr<CancelHandle> cancel = running.cancel;
  const absl::Status refused = step.task(
      {.number = static_cast<uint64_t>(seq),
       .done = [&front, id = model.id,
                seq](Result result) { End(front, id, seq, std::move(result)); },
       .cancel = cancel.get()});
  if (refused.ok()) return refused;
  if (RetryMillis(refused).has_value()) {
    model.line.running.erase(seq);
    return refused;
  }
  End(front, model.id, seq, refused);
  return absl::OkStatus();
}

// Gives the engine the model's next steps in order. Stops at a step that has
// not arrived or must wait.
void Advance(Front& front, const std::string& id) {
  Model* const model = FindModel(front, id);
  if (model == nullptr || model->line.advances) return;
  StepLine& line = model->line;
  line.advances = true;
  while (!line.held && line.running.size() < kMaxRunning) {
    const int64_t seq = line.next;
    auto step = line.arrived.extract(seq);
    if (step.empty()) break;
    ++line.next;
    if (!Run(front, *model, seq, step.mapped()).ok()) {
      line.arrived.insert(std::move(step));
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
    if (ServerStops(front, result.status())) return;
    Finish(front, future, std::move(result));
  };
  const absl::Status refused = step.task({.number = static_cast<uint64_t>(seq),
                                          .done = finish,
                                          .cancel = nullptr});
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
  model->line.held = false;
  Advance(front, id);
}

}  // namespace weft::tinker
