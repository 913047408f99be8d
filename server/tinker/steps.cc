#include "server/tinker/steps.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/http/replies.h"
#include "server/tinker/checkpoints.h"
#include "server/tinker/handlers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/wire/fields.h"
#include "server/tinker/wire/train_wire.h"
#include "server/wire/field_checks.h"
#include "server/wire/status_conversion.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

// While the server starts, retrieve_future fails after this pause, so that
// clients do not ask again at once.
constexpr absl::Duration kStartPause = absl::Seconds(1);
// Bytes of memory that a step needs besides its request, in the front and in
// the engine.
constexpr int64_t kStepBytes = 8192;
// The pause before a step that the engine has refused for now is tried again.
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

// Writes the request to the ledger, if `id` has a sequence number. Then runs
// `done` with the status of the write. If `done` returns an error, drops the
// future and erases the request. Then answers all clients that wait for the
// promise, with the future's id or the error. A request from the ledger stays
// there, and gets the error of `done` from Keep.
absl::Status Keep(Front& front, const CallPtr& call, const PromiseId& id,
                  const Respond& respond,
                  std::function<absl::Status(const absl::Status&)> done) {
  const std::string future = id.ToString();
  const auto end = [&front, id, future, kept = call->kept,
                    done = std::move(done)](const absl::Status& put) {
    absl::Status began = done(put);
    if (!began.ok()) {
      front.futures.Drop(future);
      if (id.seq && !kept) front.ledger.Erase(EntryKind::kStep, future);
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
  front.ledger.Put(EntryKind::kStep,
                   {.id = future,
                    .fields = {{"model", id.model},
                               {"seq", *id.seq},
                               {"target", call->http.target},
                               {"content_type", call->http.content_type},
                               {"caller", CallerToJson(call->caller)}},
                    .bytes = call->http.body},
                   end);
  return absl::OkStatus();
}

// Opens the future and returns true. If the future exists already, returns
// false and responds with the future's id. But while Keep still writes the
// request, leaves the response to Keep.
bool Open(Front& front, const CallPtr& call, const PromiseId& id,
          const Respond& respond) {
  const std::string future = id.ToString();
  if (front.futures.Open(future, call->owner(), Scope::kTrain)) return true;
  const Writes::Done responds = Responds(id, respond);
  if (!front.writes.Join(future, responds)) responds(absl::OkStatus());
  return false;
}

// Returns for how many steps that have not come the step has to wait.
uint64_t AheadOf(const Front& front, const Model& model, int64_t seq) {
  const engine::Engine* const engine = front.port.core()->engine.Peek();
  const auto number = static_cast<uint64_t>(seq);
  const uint64_t ahead = model.made && engine != nullptr
                             ? engine->Ahead(model.adapter, number)
                             : number - 1;
  // Those in the line have come.
  const uint64_t here = model.line.waiting.size();
  return ahead > here ? ahead - here : 0;
}

// Charges for a step's request, its message and its plain form.
absl::StatusOr<std::shared_ptr<void>> ChargeStep(const Front& front,
                                                 const Call& call,
                                                 const Model& model,
                                                 int64_t seq,
                                                 const StepCost& cost) {
  int64_t bytes = kStepBytes + 2 * cost.bytes;
  // The ledger keeps the body in memory, too.
  if (front.ledger.keeps())
    bytes += static_cast<int64_t>(call.http.body.size());
  const uint64_t ahead = AheadOf(front, model, seq);
  // A step that replays leaves room for what it takes as it begins.
  return front.port.core()->memory->ReserveRequest(
      call.owner(), bytes, /*beside=*/0,
      cost.replays ? std::max<uint64_t>(ahead, 1) : ahead);
}

// If there is no such future, opens that of a step that ended before the server
// started, or whose result the front has forgotten, and gives it the engine's
// result; likewise the future of a model that was made. Then calls `then`.
// Opens nothing if the engine has no such result.
void Reopen(Front& front, const CallPtr& call, const std::string& id,
            const std::function<void()>& then) {
  const size_t colon = id.rfind(':');
  int64_t seq = 0;
  const auto model = front.models.FindOf(call->owner(), id.substr(0, colon));
  if (front.futures.Has(id) || colon == std::string::npos || !model.ok() ||
      !absl::SimpleAtoi(id.substr(colon + 1), &seq) || seq < kCreateSeq) {
    return then();
  }
  if (seq == kCreateSeq) {
    if ((*model)->made &&
        front.futures.Open(id, call->owner(), Scope::kTrain)) {
      front.futures.Finish(id, FutureResult::Of({{"model_id", (*model)->id}}));
    }
    return then();
  }
  front.port.Retrieve(
      call->origin(), (*model)->adapter, static_cast<uint64_t>(seq),
      [&front, call, id, model_id = (*model)->id,
       then](const absl::StatusOr<std::shared_ptr<const StepResult>>& result) {
        if (result.ok() &&
            front.futures.Open(id, call->owner(), Scope::kTrain)) {
          front.futures.Finish(id, OutputOf(model_id, call->caller, **result));
        }
        then();
      });
}

using Result = absl::StatusOr<FutureResult>;

// Ends the future of a step, or of a request that makes or unloads a model. The
// ledger forgets the request, because the engine has stored the result
// (Retrieve), or has the model. UNAVAILABLE means that the server stops, unless
// the adapter is being restored. The future then gets no result, because the
// restarted server runs the request again.
void EndStep(Front& front, const std::string& future, Result result) {
  const std::optional<Reason> reason = FindReason(result.status());
  const bool stops = absl::IsUnavailable(result.status()) &&
                     !(reason && reason->name == "ADAPTER_RECOVERING");
  if (stops && front.ledger.keeps()) return;
  front.ledger.Erase(EntryKind::kStep, future);
  front.futures.Finish(future, result.ok()
                                   ? *std::move(result)
                                   : FutureResult::Failed(result.status()));
}

// Gives a step to the engine. Returns an error only if the step may succeed
// later; any other error ends the step.
absl::Status RunStep(Front& front, const Model& model, int64_t seq,
                     const ArrivedStep& step) {
  const auto done = [&front, id = model.id, seq, step](Result result) {
    const absl::Status& status = result.status();
    // The engine has not taken the step, or a drain took it back, because a
    // lower one is missing. It waits until the server takes it, or for the next
    // process. An engine that has failed takes no step again.
    const engine::Engine* const engine = front.port.core()->engine.Peek();
    const bool takes_steps = engine == nullptr || engine->failure().ok();
    if (takes_steps && RetryMillis(status) &&
        !status.GetPayload(kStepDonePayload)) {
      return front.after(kRetryPause, [&front, id, seq, step] {
        EnterStep(front, id, seq, step);
      });
    }
    EndStep(front, step.future, std::move(result));
  };
  const absl::Status refused = step.task(step.origin, done);
  if (refused.ok() || RetryMillis(refused)) return refused;
  const absl::Status entered = front.port.RefuseStep(
      step.origin, step.rpc,
      {.adapter_id = model.adapter,
       .step = static_cast<uint64_t>(seq),
       .digest = absl::StrCat("refused: ", refused.ToString()),
       .status = refused},
      [done](const absl::StatusOr<bool>& failed) { done(failed.status()); });
  if (entered.ok() || RetryMillis(entered)) return entered;
  done(refused);  // The engine has no such adapter, or has the number already.
  return absl::OkStatus();
}

// Gives the model's steps to the engine, the lowest first.
void Advance(Front& front, const std::string& id) {
  Model* const model = front.models.Find(id);
  if (model == nullptr || model->line.held || model->line.retries) return;
  StepLine& line = model->line;
  while (!line.waiting.empty()) {
    auto first = line.waiting.extract(line.waiting.begin());
    const absl::Status refused =
        RunStep(front, *model, first.key(), first.mapped());
    if (!refused.ok()) {
      line.waiting.insert(std::move(first));
      line.retries = true;
      // The engine says when a tenant may use more tokens.
      const absl::Duration pause =
          absl::IsResourceExhausted(refused)
              ? absl::Milliseconds(RetryMillis(refused).value_or(0))
              : kRetryPause;
      return front.after(std::max(kRetryPause, pause), [&front, id] {
        Model* const later = front.models.Find(id);
        if (later == nullptr) return;
        later->line.retries = false;
        Advance(front, id);
      });
    }
  }
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
          EndStep(front, id.ToString(), std::move(result));
        };
        absl::Status refused = kept.ok() ? unoffered : kept;
        if (refused.ok()) refused = task(finish);
        if (refused.ok() || RetryMillis(refused).has_value()) return refused;
        finish(refused);
        return absl::OkStatus();
      };
  return Keep(front, call, id, respond, begin);
}

void EnterStep(Front& front, const std::string& model_id, int64_t seq,
               ArrivedStep step) {
  Model* const model = front.models.Find(model_id);
  if (model == nullptr) {
    return EndStep(front, step.future,
                   absl::NotFoundError("the model is gone"));
  }
  model->line.waiting.emplace(seq, std::move(step));
  Advance(front, model_id);
}

void OpenLine(Front& front, const std::string& id) {
  Model* const model = front.models.Find(id);
  if (model == nullptr) return;
  model->line.held = false;
  Advance(front, id);
}

absl::StatusOr<StepPlace> ReadPlace(const Json& body) {
  StepPlace place;
  WEFT_ASSIGN_OR_RETURN(place.model, Text(body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(place.seq, Int(body, "seq_id"));
  return place;
}

absl::Status PromiseStep(Front& front, const CallPtr& call, Rpc rpc,
                         const StepPlace& place, const StepCost& cost,
                         StepTask task, const Respond& respond) {
  const auto& [model_id, seq] = place;
  WEFT_ASSIGN_OR_RETURN(const Model* const model,
                        front.models.FindOf(call->owner(), model_id));
  if (seq < 1) return BadField("seq_id", "must be at least 1");
  if (!front.ready && !call->kept) {
    return absl::UnavailableError("the server is starting");
  }
  const PromiseId id{.model = model_id, .seq = seq};
  if (!Open(front, call, id, respond)) return absl::OkStatus();
  auto charge = ChargeStep(front, *call, *model, seq, cost);
  absl::Status fails = front.CheckOffered(call->body);
  if (!charge.ok() && !RetryMillis(charge.status())) {
    fails = charge.status();
    charge = ChargeStep(front, *call, *model, seq, {});
  }
  // A step of the ledger had room before the restart.
  if (!charge.ok() && !call->kept) {
    front.futures.Drop(id.ToString());
    return charge.status();
  }
  if (!fails.ok()) {
    task = [fails](const CallOrigin&, const Callback<FutureResult>&) {
      return fails;
    };
  }
  ArrivedStep step{.future = id.ToString(),
                   .origin = call->origin(),
                   .rpc = rpc,
                   .task = std::move(task)};
  step.origin.charge = std::move(charge).value_or(nullptr);
  return Keep(
      front, call, id, respond,
      [&front, place, step = std::move(step)](const absl::Status& kept) {
        if (kept.ok()) EnterStep(front, place.model, place.seq, step);
        return kept;
      });
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
  const auto retrieve = [&front, call, id, allow_metadata, protobuf, respond] {
    const absl::Status may = CheckScope(front, *call, id);
    if (!may.ok()) return Fail(respond, may);
    front.futures.Retrieve(id, call->owner(), allow_metadata, protobuf,
                           respond);
  };
  Reopen(front, call, id, retrieve);
  return absl::OkStatus();
}

namespace {

constexpr char kSnapshotPrefix[] = "sample-";

}  // namespace

std::string SamplerId(absl::string_view session, int64_t number) {
  return absl::StrCat(session, ":sample:", number);
}

std::string SnapshotName(int64_t number) {
  return absl::StrCat(kSnapshotPrefix, number);
}

FutureResult OutputOf(absl::string_view /*model*/, const TrainResult& result) {
  return {.body = TrainOutput(result), .to_json = TrainOutputJson};
}

FutureResult OutputOf(absl::string_view /*model*/,
                      const OptimStepResult& result) {
  return FutureResult::Of({{"metrics", {{"grad_norm", result.grad_norm}}}});
}

FutureResult OutputOf(absl::string_view model, const CheckpointInfo& result) {
  const CheckpointPath path = PathOfWeft(model, result.name);
  return FutureResult::Of(
      {{"path", path.ToString()}, {"type", path.SavedBy()}});
}

FutureResult OutputOf(absl::string_view model, const AdapterInfo& /*result*/) {
  return FutureResult::Of({{"model_id", model}, {"type", "load_weights"}});
}

FutureResult OutputOf(absl::string_view model,
                      const PublishedSnapshot& result) {
  int64_t number = 0;  // PublishSampler has named the snapshot (SnapshotName).
  (void)absl::SimpleAtoi(absl::StripPrefix(result.name, kSnapshotPrefix),
                         &number);
  return FutureResult::Of(
      {{"type", "save_weights_for_sampler"},
       {"path", nullptr},
       {"sampling_session_id", SamplerId(SessionOf(model), number)}});
}

FutureResult OutputOf(absl::string_view model, const Caller& caller,
                      const StepResult& result) {
  return std::visit(
      [&](const auto& kind) {
        if constexpr (std::is_same_v<std::decay_t<decltype(kind)>,
                                     StepFailure>) {
          return FutureResult::Failed(caller.RevealError(kind.status));
        } else {
          return OutputOf(model, kind);
        }
      },
      result);
}

}  // namespace weft::server::tinker
