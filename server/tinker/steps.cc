#include "server/tinker/steps.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/field_checks.h"
#include "server/status_conversion.h"
#include "server/tinker/errors.h"
#include "src/base/log.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// As many as the dispatcher keeps replies of.
constexpr int64_t kKeptSteps = 64;
// When to try again what the engine had no room for.
constexpr absl::Duration kRetryPause = absl::Milliseconds(100);
// How long a retrieval waits while the server starts.
constexpr absl::Duration kStartPause = absl::Seconds(1);
// No checkpoint can have this name, so that loading it does nothing.
constexpr char kNoCheckpoint[] = "~";

void RespondPromise(const PromiseId& id, const Respond& respond) {
  Json reply = {{"request_id", id.ToString()}};
  if (!id.model.empty()) reply["model_id"] = id.model;
  respond(JsonReply(reply));
}

absl::Status Keep(Front& front, const CallPtr& call, const PromiseId& id) {
  if (!id.seq) return absl::OkStatus();
  front.ledger.Erase(
      EntryKind::kStep,
      PromiseId{.model = id.model, .seq = *id.seq - kKeptSteps}.ToString());
  return front.ledger.Put(EntryKind::kStep,
                          {.id = id.ToString(),
                           .fields = {{"model", id.model},
                                      {"seq", *id.seq},
                                      {"target", call->http.target},
                                      {"content_type", call->http.content_type},
                                      {"caller", CallerToJson(call->caller)}},
                           .bytes = call->http.body});
}

void Forget(Front& front, const PromiseId& id) {
  front.futures.Drop(id.ToString());
  if (id.seq) front.ledger.Erase(EntryKind::kStep, id.ToString());
}

void FinishWith(Front& front, const PromiseId& id,
                absl::StatusOr<FutureResult> result) {
  front.futures.Finish(
      id.ToString(),
      result.ok() ? *std::move(result) : FutureResult::Failed(result.status()));
}

// Whether a step that ended like this leaves its number free.
bool LeavesGap(const absl::Status& status) {
  return !status.GetPayload(kStepDonePayload) && !absl::IsNotFound(status) &&
         !absl::IsAlreadyExists(status) && !absl::IsOutOfRange(status) &&
         !absl::IsUnavailable(status);
}

// Gives a step to what does nothing, so that those after it can run.
void FillStep(Front& front, const CallOrigin& origin,
              const std::string& adapter, uint64_t step) {
  LoadCheckpointRequest nothing;
  nothing.adapter_id = adapter;
  nothing.source_adapter_id = adapter;
  nothing.name = kNoCheckpoint;
  nothing.step = step;
  const absl::Status refused = front.port.CallPlain<StepReply<AdapterInfo>>(
      origin, Rpc::kLoadCheckpoint, std::move(nothing),
      [](Engine& engine, LoadCheckpointRequest plain, auto done) {
        engine.LoadCheckpoint(std::move(plain), std::move(done));
      },
      [](const absl::StatusOr<StepReply<AdapterInfo>>& /*result*/) {});
  if (!absl::IsResourceExhausted(refused)) return;
  front.after(kRetryPause, [&front, origin, adapter, step] {
    FillStep(front, origin, adapter, step);
  });
}

struct Step {
  CallPtr call;
  PromiseId id;
  StepTask task;
};

// Starts a step at its place. Returns only what may succeed later; any other
// refusal is the future's result.
absl::Status RunStep(Front& front, const Model& model, const Step& step) {
  const uint64_t number = model.StepOf(*step.id.seq);
  const auto end = [&front, origin = step.call->origin(), id = step.id,
                    adapter = model.adapter,
                    number](absl::StatusOr<FutureResult> result) {
    // A server that stops answers nothing: the next one runs the step.
    if (absl::IsUnavailable(result.status()) && front.ledger.keeps()) return;
    if (!result.ok() && LeavesGap(result.status())) {
      FillStep(front, origin, adapter, number);
    }
    FinishWith(front, id, std::move(result));
  };
  const absl::Status refused = step.task(number, end);
  if (refused.ok()) return refused;
  if (RetryMillis(refused).has_value()) return refused;
  end(refused);
  return absl::OkStatus();
}

// RunStep for one that is promised: it must start.
void RunPromised(Front& front, const std::string& model, const Step& step) {
  const auto found = front.models.find(model);
  if (found == front.models.end()) {
    return FinishWith(front, step.id, absl::NotFoundError("the model is gone"));
  }
  if (RunStep(front, found->second, step).ok()) return;
  front.after(kRetryPause,
              [&front, model, step] { RunPromised(front, model, step); });
}

}  // namespace

std::string PromiseId::ToString() const {
  return seq ? absl::StrCat(model, ":", *seq) : absl::StrCat(model, ":", name);
}

absl::Status Promise(Front& front, const CallPtr& call, const PromiseId& id,
                     const Task& task, const Respond& respond) {
  if (front.futures.Open(id.ToString(), call->owner())) {
    absl::Status refused = Keep(front, call, id);
    if (refused.ok()) {
      refused = task([&front, id](absl::StatusOr<FutureResult> result) {
        // The request that made a model must not make it again after it has
        // trained.
        if (id.seq) front.ledger.Erase(EntryKind::kStep, id.ToString());
        FinishWith(front, id, std::move(result));
      });
    }
    if (!refused.ok() && RetryMillis(refused).has_value()) {
      Forget(front, id);
      return refused;
    }
    if (!refused.ok()) FinishWith(front, id, refused);
  }
  RespondPromise(id, respond);
  return absl::OkStatus();
}

absl::Status PromiseStep(Front& front, const CallPtr& call,
                         const std::string& model_id, int64_t seq,
                         StepTask task, const Respond& respond) {
  if (seq < 1) return BadField("seq_id", "must be at least 1");
  WEFT_ASSIGN_OR_RETURN(Model* const model, front.FindModel(*call, model_id));
  const Step step{call, {.model = model_id, .seq = seq}, std::move(task)};
  if (!front.futures.Open(step.id.ToString(), call->owner())) {
    RespondPromise(step.id, respond);
    return absl::OkStatus();
  }
  absl::Status refused = Keep(front, call, step.id);
  if (refused.ok() && model->loading && seq > *model->loading) {
    model->held.push_back(
        [&front, model_id, step] { RunPromised(front, model_id, step); });
  } else if (refused.ok()) {
    refused = RunStep(front, *model, step);
  }
  if (!refused.ok()) {
    Forget(front, step.id);
    return refused;
  }
  RespondPromise(step.id, respond);
  return absl::OkStatus();
}

void BeginLoad(Model& model, int64_t seq) { model.loading = seq; }

void EndLoad(Front& front, Model& model, int64_t seq,
             std::optional<uint64_t> last_step) {
  if (last_step) {
    model.offsets.emplace_back(seq + 1, static_cast<int64_t>(*last_step) - seq);
  }
  model.loading.reset();
  // They may hold others that arrive meanwhile.
  for (const auto& run : std::exchange(model.held, {})) {
    front.after(absl::ZeroDuration(), run);
  }
}

absl::Status RetrieveFuture(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringField(call->body, "request_id"));
  WEFT_ASSIGN_OR_RETURN(const bool allow_metadata,
                        BoolOr(call->body, "allow_metadata_only", false));
  if (!front.ready) {
    front.after(kStartPause, [respond] {
      respond(ErrorReply(absl::UnavailableError("the server is starting")));
    });
    return absl::OkStatus();
  }
  const bool protobuf =
      call->http.accept.find(kProtobufType) != std::string::npos;
  front.futures.Retrieve(id, call->owner(), allow_metadata, protobuf, respond);
  return absl::OkStatus();
}

absl::Status CancelFuture(Front& front, const CallPtr& call,
                          const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string id,
                        StringField(call->body, "request_id"));
  const auto found = front.cancels.find(absl::StrCat(call->owner(), "/", id));
  if (found != front.cancels.end()) found->second.Cancel();
  respond(JsonReply(Json::object()));
  return absl::OkStatus();
}

void EraseSteps(Front& front, const std::string& model) {
  for (const LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kStep)) {
    if (entry.fields.value("model", "") != model) continue;
    front.ledger.Erase(EntryKind::kStep, entry.id);
  }
}

namespace {

// A load sets a model back, so that its numbers begin anew. A step from before
// the load would run as one of the steps that follow it.
bool IsBeforeLoad(const Front& front, const LedgerEntry& entry) {
  const auto model = front.models.find(entry.fields.value("model", ""));
  if (model == front.models.end() || model->second.offsets.empty()) {
    return false;
  }
  const int64_t load = model->second.offsets.back().first - 1;
  return entry.fields.value("seq", int64_t{0}) < load;
}

}  // namespace

void RestoreSteps(Front& front, const std::function<void(CallPtr)>& run) {
  std::vector<LedgerEntry> entries = front.ledger.ReadAll(EntryKind::kStep);
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return a.fields.value("seq", int64_t{0}) <
           b.fields.value("seq", int64_t{0});
  });
  for (LedgerEntry& entry : entries) {
    if (IsBeforeLoad(front, entry)) {
      front.ledger.Erase(EntryKind::kStep, entry.id);
      continue;
    }
    const auto call = std::make_shared<Call>();
    call->http.method = "POST";
    call->http.target = entry.fields.value("target", "");
    call->http.content_type = entry.fields.value("content_type", "");
    call->http.body = std::move(entry.bytes);
    call->caller = CallerFromJson(entry.fields["caller"]);
    run(call);
  }
}

}  // namespace weft::tinker
