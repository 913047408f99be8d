#include "server/tinker/steps.h"

#include <algorithm>
#include <map>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/http/replies.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/handlers.h"
#include "server/tinker/ledger.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/wire/fields.h"
#include "server/tinker/wire/train_wire.h"
#include "server/wire/field_checks.h"
#include "server/wire/request_fields.h"
#include "server/wire/status_conversion.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

// While the server starts, retrieve_future fails after this pause, so that
// clients do not ask again at once.
constexpr absl::Duration kStartPause = absl::Seconds(1);
// The least pause before a step beyond its tenant's tokens per second is tried
// again.
constexpr absl::Duration kRetryPause = absl::Milliseconds(100);

// Returns a callback that responds with the future's id, or with an error.
Writes::Done Responds(const PromiseId& id, const Respond& respond) {
  return [id, respond](const absl::Status& began) {
    if (!began.ok()) return Fail(respond, began);
    Json reply = {{"request_id", id.ToString()}};
    if (!id.model.empty()) reply["model_id"] = id.model;
    respond(JsonReply(reply));
  };
}

// Writes the request to the ledger, if it makes a model. Then runs `done` with
// the status of the write. If `done` returns an error, drops the future and
// erases the request. Then answers all clients that wait for the promise, with
// the future's id or the error. A request from the ledger stays there, and gets
// the error of `done` from Keep.
absl::Status Keep(Front& front, const CallPtr& call, const PromiseId& id,
                  const Respond& respond,
                  std::function<absl::Status(const absl::Status&)> done) {
  const std::string future = id.ToString();
  const auto end = [&front, id, future, kept = call->kept,
                    done = std::move(done)](const absl::Status& put) {
    absl::Status began = done(put);
    if (!began.ok()) {
      front.futures.Drop(future);
      if (id.seq && !kept) front.ledger.Erase(EntryKind::kMaking, id.model);
    }
    front.writes.End(future, began);
    return began;
  };
  if (call->kept) return end(absl::OkStatus());
  front.writes.Begin(future, Responds(id, respond));
  if (!id.seq) {
    end(absl::OkStatus()).IgnoreError();
    return absl::OkStatus();
  }
  front.ledger.Put(
      EntryKind::kMaking,
      {.id = id.model,
       .fields = {{"loads", absl::StrContains(call->http.target, "load_")},
                  {"caller", CallerToJson(call->caller)}},
       .bytes = call->http.body},
      end);
  return absl::OkStatus();
}

// Opens the future and returns true. If the future exists already, returns
// false and responds with the future's id. But while the request is not kept
// yet, leaves the response to the end of that.
bool Open(Front& front, const CallPtr& call, const PromiseId& id,
          const Respond& respond) {
  const std::string future = id.ToString();
  if (front.futures.Open(future, call->owner(), Scope::kTrain)) return true;
  const Writes::Done responds = Responds(id, respond);
  if (!front.writes.Join(future, responds)) responds(absl::OkStatus());
  return false;
}

using Result = absl::StatusOr<FutureResult>;

// What the end of a step needs besides its result.
struct StepEnd {
  std::string future;
  std::string model;
  Caller caller;
  Json note;
};

// Return the result of a future: AdapterInfo is the result of a load, and
// PublishedSnapshot that of a save for a sampling session.
FutureResult OutputOf(const StepEnd& /*end*/, const TrainResult& result) {
  return {.body = TrainOutput(result), .to_json = TrainOutputJson};
}

FutureResult OutputOf(const StepEnd& /*end*/, const OptimStepResult& result) {
  return FutureResult::Of({{"metrics", {{"grad_norm", result.grad_norm}}}});
}

FutureResult OutputOf(const StepEnd& end, const CheckpointInfo& result) {
  const CheckpointPath path = PathOfWeft(end.model, result.name);
  return FutureResult::Of(
      {{"path", path.ToString()}, {"type", path.SavedBy()}});
}

FutureResult OutputOf(const StepEnd& end, const AdapterInfo& /*result*/) {
  Json loaded = {{"model_id", end.model}, {"type", "load_weights"}};
  if (end.note.contains(kPath)) loaded["path"] = end.note[kPath];
  return FutureResult::Of(loaded);
}

FutureResult OutputOf(const StepEnd& end, const PublishedSnapshot& result) {
  return FutureResult::Of(
      {{"type", "save_weights_for_sampler"},
       {"path", nullptr},
       {"sampling_session_id", SamplerOf(end.model, result.name)}});
}

FutureResult OutputOf(const StepEnd& end, const StepFailure& result) {
  return FutureResult::Failed(end.caller.RevealError(result.status));
}

void Finish(Front& front, const std::string& future, Result result) {
  front.futures.Finish(future, result.ok()
                                   ? *std::move(result)
                                   : FutureResult::Failed(result.status()));
  front.writes.End(future, absl::OkStatus());
}

// Returns whether a step or a model ended without a result because the server
// stops, and the restarted server runs it again. UNAVAILABLE says so, unless
// the adapter is being restored.
bool GoesOn(const Front& front, const absl::Status& status) {
  const std::optional<Reason> reason = FindReason(status);
  return absl::IsUnavailable(status) && front.ledger.keeps() &&
         !(reason && reason->name == "ADAPTER_RECOVERING");
}

// Returns whether the model's session is on its way to another log, or there.
bool IsMoving(const absl::Status& status) {
  const std::optional<Reason> reason = FindReason(status);
  return reason &&
         (reason->name == "ADAPTER_RECOVERING" || reason->name == "MOVED");
}

// Ends the future of a request that makes or unloads a model. The ledger
// forgets the request, because the engine has the model. If the model's session
// moves, the client sends the request again.
void EndRequest(Front& front, const PromiseId& id, Result result) {
  if (GoesOn(front, result.status())) return;
  if (IsMoving(result.status())) {
    front.futures.Drop(id.ToString());
    return front.writes.End(id.ToString(), absl::OkStatus());
  }
  if (id.seq) front.ledger.Erase(EntryKind::kMaking, id.model);
  Finish(front, id.ToString(), std::move(result));
}

// Counts and notes what a step did, unless an equal one did it.
void Account(Front& front, const StepEnd& end, const StepResult& result) {
  const std::string session(SessionOf(end.model));
  if (std::holds_alternative<TrainResult>(result)) {
    front.accounts.Count(OwnerKey(end.caller), session,
                         {.train_tokens = end.note.value(kTokens, int64_t{0})});
  } else if (const auto* saved = std::get_if<CheckpointInfo>(&result)) {
    front.accounts.Note(end.caller, "create",
                        PathOfWeft(end.model, saved->name));
    front.accounts.Count(OwnerKey(end.caller), session, {.checkpoints = 1});
  } else if (std::holds_alternative<AdapterInfo>(result)) {
    const auto path = ParseCheckpointPath(end.note.value(kPath, ""));
    if (path.ok()) front.accounts.Note(end.caller, "read", *path, "load");
  }
}

// Ends the future of a step. The engine keeps the result (Retrieve), too.
void EndStep(Front& front, const StepEnd& end,
             const absl::StatusOr<StepReply<StepResultPtr>>& reply) {
  if (GoesOn(front, reply.status())) return;
  if (!reply.ok()) {
    return Finish(front, end.future, end.caller.RevealError(reply.status()));
  }
  const StepResult& result = *reply->result;
  if (!reply->replayed) Account(front, end, result);
  Result output = std::visit(
      [&end](const auto& kind) { return OutputOf(end, kind); }, result);
  Model* const model = front.models.Find(end.model);
  const auto* const loaded = std::get_if<AdapterInfo>(&result);
  if (loaded != nullptr && model != nullptr) {
    model->optimizer = TypeOf(loaded->optimizer);
  }
  const auto* const published = std::get_if<PublishedSnapshot>(&result);
  if (published == nullptr || model == nullptr) {
    return Finish(front, end.future, std::move(output));
  }
  KeepPublished(front, *model, published->name,
                [&front, future = end.future,
                 output = std::move(output)](const absl::Status& kept) {
                  if (!IsMoving(kept)) {
                    return Finish(front, future,
                                  kept.ok() ? output : Result(kept));
                  }
                  // The client asks again where the session goes.
                  front.futures.Drop(future);
                  front.writes.End(future, absl::OkStatus());
                });
}

bool Loads(const Json& note) { return note.value(kOptimizer, false); }

// Counts a load of a checkpoint with its optimizer until `done` runs
// (Model::loads). For another step, returns `done`.
StepDone CountLoad(Front& front, Model& model, const Json& note,
                   StepDone done) {
  if (!Loads(note)) return done;
  ++model.loads;
  return [&front, id = model.id, done = std::move(done)](
             const absl::StatusOr<StepReply<StepResultPtr>>& reply) {
    if (Model* const found = front.models.Find(id)) --found->loads;
    done(reply);
  };
}

// Has a future wait for a step that the engine has. Drops it if there is no
// such step, or its result is no longer kept. `note` is that of a resumed step,
// or empty.
void Attach(Front& front, Model& model, uint64_t seq, const std::string& note,
            std::shared_ptr<void> charge) {
  const Json fields = Json::parse(note, nullptr, /*allow_exceptions=*/false);
  StepEnd end{.future = absl::StrCat(model.id, ":", seq),
              .model = model.id,
              .caller = model.caller,
              .note = fields.is_object() ? fields : Json::object()};
  if (!front.futures.Open(end.future, model.owner, Scope::kTrain)) return;
  if (end.note.contains(kCaller)) {
    end.caller = CallerFromJson(end.note[kCaller]);
  }
  const StepDone done =
      CountLoad(front, model, end.note,
                [&front, end, charge = std::move(charge)](
                    const absl::StatusOr<StepReply<StepResultPtr>>& reply) {
                  if (reply.ok() || GoesOn(front, reply.status()) ||
                      reply.status().GetPayload(kStepDonePayload)) {
                    return EndStep(front, end, reply);
                  }
                  front.futures.Drop(end.future);
                });
  const StepCallback typed = TypedReply(done);
  front.port.Retrieve(
      {.caller = model.caller}, model.adapter, seq,
      [typed, replayed = note.empty()](absl::StatusOr<StepResultPtr> result) {
        typed(std::move(result), replayed);
      });
}

// If there is no such future, opens that of a step that ended before the server
// started, or whose result the front has forgotten; likewise the future of a
// model that was made.
void Reopen(Front& front, const Call& call, const std::string& id) {
  const size_t colon = id.rfind(':');
  int64_t seq = 0;
  const auto model = front.models.FindOf(call.owner(), id.substr(0, colon));
  if (front.futures.Has(id) || colon == std::string::npos || !model.ok() ||
      !absl::SimpleAtoi(id.substr(colon + 1), &seq) || seq < kCreateSeq) {
    return;
  }
  if (seq > kCreateSeq) {
    return Attach(front, **model, static_cast<uint64_t>(seq), "", nullptr);
  }
  if ((*model)->made && front.futures.Open(id, call.owner(), Scope::kTrain)) {
    front.futures.Finish(id, FutureResult::Of({{"model_id", (*model)->id}}));
  }
}

// A step that the engine does not have yet.
struct NewStep {
  StepEnd end;
  CallOrigin origin;
  Rpc rpc;
  uint64_t seq;
  StepStart task;
};

// Answers a request that the engine has not accepted as a step.
void Refuse(Front& front, const std::string& future,
            const absl::Status& status) {
  front.futures.Drop(future);
  front.writes.End(future, status);
}

// Gives a step to the engine. A step whose task fails is given to the engine,
// too, to fail in its turn, so that the steps after it can run. A step beyond
// its tenant's tokens per second waits. Any other error that is transient
// (RetryMillis) refuses the request.
void RunStep(Front& front, const std::shared_ptr<const NewStep>& step) {
  const std::string& future = step->end.future;
  Model* const model = front.models.Find(step->end.model);
  if (model == nullptr) {
    return Finish(front, future, absl::NotFoundError("the model is gone"));
  }
  const StepDone end =
      [&front, info = step->end](
          const absl::StatusOr<StepReply<StepResultPtr>>& reply) {
        const absl::Status& status = reply.status();
        const bool is_new = front.writes.Has(info.future);
        if (is_new && RetryMillis(status)) {
          return Refuse(front, info.future, status);
        }
        if (is_new && IsMoving(status)) {
          return Refuse(front, info.future,
                        absl::UnavailableError(status.message()));
        }
        EndStep(front, info, reply);
      };
  const absl::Status refused =
      step->task(step->origin, CountLoad(front, *model, step->end.note, end));
  if (refused.ok()) return;
  if (Loads(step->end.note)) --model->loads;
  const std::optional<Reason> reason = FindReason(refused);
  if (reason && reason->name == "TOKEN_RATE") {
    const auto pause = absl::Milliseconds(RetryMillis(refused).value_or(0));
    return front.after(std::max(kRetryPause, pause),
                       [&front, step] { RunStep(front, step); });
  }
  if (RetryMillis(refused)) return Refuse(front, future, refused);
  const absl::Status entered = front.port.RefuseStep(
      step->origin, step->rpc,
      {.adapter_id = model->adapter,
       .step = step->seq,
       .digest = absl::StrCat("refused: ", refused.ToString()),
       .status = refused},
      [end](const absl::StatusOr<bool>& failed) { end(failed.status()); });
  if (entered.ok()) return;
  // Otherwise the engine has no such adapter, or has the number already.
  RetryMillis(entered) ? Refuse(front, future, entered) : end(refused);
}

// Returns PERMISSION_DENIED unless the caller's token could have made the
// request of this future.
absl::Status CheckScope(const Front& front, const Call& call,
                        const std::string& id) {
  const Scope scope = front.futures.ScopeOf(id, call.owner());
  if ((scope != Scope::kTrain || front.Permits(call, Rpc::kDeleteAdapter)) &&
      (scope != Scope::kSample || front.Permits(call, Rpc::kSample))) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat("the token lacks the scope ", ScopeName(scope),
                   ", which the request of this future needed"));
}

}  // namespace

std::string PromiseId::ToString() const {
  return seq ? absl::StrCat(model, ":", *seq) : absl::StrCat(model, ":", name);
}

absl::Status Promise(Front& front, const CallPtr& call, const PromiseId& id,
                     const Task& task, const Respond& respond) {
  if (!Open(front, call, id, respond)) return absl::OkStatus();
  // The ledger keeps the request until its end.
  const auto begin =
      [&front, id, task, charge = call->charge,
       unoffered = front.CheckOffered(call->body)](const absl::Status& kept) {
        const auto finish = [&front, id, charge](Result result) {
          EndRequest(front, id, std::move(result));
        };
        absl::Status refused = kept.ok() ? unoffered : kept;
        if (refused.ok()) refused = task(finish);
        if (refused.ok() || RetryMillis(refused).has_value()) return refused;
        finish(refused);
        return absl::OkStatus();
      };
  return Keep(front, call, id, respond, begin);
}

absl::StatusOr<StepPlace> ReadPlace(const Json& body) {
  StepPlace place;
  WEFT_ASSIGN_OR_RETURN(place.model, Text(body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(place.seq, Int(body, "seq_id"));
  return place;
}

absl::Status PromiseStep(Front& front, const CallPtr& call, Rpc rpc,
                         const StepPlace& place, Json note, StepStart task,
                         const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const Model* const model,
                        front.models.FindOf(call->owner(), place.model));
  if (place.seq < 1) return BadField("seq_id", "must be at least 1");
  if (!front.ready || model->making) {
    return absl::UnavailableError(front.ready ? "the model is being made"
                                              : "the server is starting");
  }
  const PromiseId id{.model = place.model, .seq = place.seq};
  if (!Open(front, call, id, respond)) return absl::OkStatus();
  const absl::Status offered = front.CheckOffered(call->body);
  if (!offered.ok()) {
    task = [offered](const CallOrigin&, const StepDone&) { return offered; };
    note = Json::object();
  }
  CallOrigin origin = call->origin();
  origin.keep = {.note = note.empty() ? "" : note.dump(),
                 // The front may be gone when the step is on disk.
                 .kept = [&front, port = front.port, future = id.ToString()] {
                   port.Post([&front, future] {
                     front.writes.End(future, absl::OkStatus());
                   });
                 }};
  front.writes.Begin(id.ToString(), Responds(id, respond));
  RunStep(front, std::make_shared<const NewStep>(
                     NewStep{.end = {.future = id.ToString(),
                                     .model = place.model,
                                     .caller = call->caller,
                                     .note = std::move(note)},
                             .origin = std::move(origin),
                             .rpc = rpc,
                             .seq = static_cast<uint64_t>(place.seq),
                             .task = std::move(task)}));
  return absl::OkStatus();
}

void AttachSteps(Front& front) {
  std::map<std::string, Model*> models;
  for (auto& [id, model] : front.models) {
    std::string adapter = model.adapter;
    if (model.caller.Qualify(FieldsOf(&adapter)).ok()) models[adapter] = &model;
  }
  for (const KeptStep& step : front.port.core()->engine.Peek()->TakeResumed()) {
    const auto model = models.find(step.adapter_id);
    if (model == models.end()) continue;
    // The step had room before the restart.
    auto charge = front.port.core()->memory->ReserveRequest(
        model->second->owner, step.bytes, /*beside=*/0, /*ahead=*/0);
    Attach(front, *model->second, step.step, step.note,
           std::move(charge).value_or(nullptr));
  }
}

absl::Status RetrieveFuture(Front& front, const CallPtr& call,
                            const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string id, Text(call->body, "request_id"));
  WEFT_ASSIGN_OR_RETURN(const bool allow_metadata,
                        Bool(call->body, "allow_metadata_only", false));
  if (!front.ready) {
    front.after(kStartPause, [respond] {
      Fail(respond, absl::UnavailableError("the server is starting"));
    });
    return absl::OkStatus();
  }
  const bool protobuf =
      call->http.accept.find(kProtobufType) != std::string::npos;
  Reopen(front, *call, id);
  WEFT_RETURN_IF_ERROR(CheckScope(front, *call, id));
  front.futures.Retrieve(id, call->owner(), allow_metadata, protobuf, respond);
  return absl::OkStatus();
}

}  // namespace weft::server::tinker
