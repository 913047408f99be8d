#include "server/tinker/training.h"

#include <cstdint>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "server/tinker/errors.h"
#include "server/tinker/handlers.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/sessions.h"
#include "server/tinker/steps.h"
#include "server/tinker/wire/train_wire.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"
#include "src/request/loss_graph.h"

namespace weft::server::tinker {
namespace {

// Parses the body, which is JSON or protobuf.
absl::StatusOr<ForwardBackwardRequest> ParseTrain(const Call& call) {
  if (!absl::StrContains(call.http.content_type, kProtobufType)) {
    return TrainFromJson(call.body);
  }
  ForwardBackwardRequest request;
  if (!request.ParseFromString(call.http.body)) {
    return absl::InvalidArgumentError(
        "the body is not a ForwardBackwardRequest");
  }
  return request;
}

// Gives the step to the engine. `Message` is ForwardBackwardRequest or
// ForwardRequest, which have the same fields.
template <typename Message>
absl::Status CallTrain(Front& front, const CallOrigin& origin, Rpc rpc,
                       const Message& request, const StepDone& done) {
  const std::string owner = OwnerKey(*origin.caller);
  return front.port.CallWith<StepReply<StepResultPtr>>(
      origin, rpc, request,
      [&front, owner, keep = origin.keep](engine::Engine& engine,
                                          TrainRequest plain, auto then) {
        // Without a record the client's own values serve.
        plain.replay.optional = true;
        const bool replays = !plain.replay.spans.empty();
        std::function<void()> train = [&engine, plain = std::move(plain), keep,
                                       then = std::move(then)]() mutable {
          engine.Submit(std::move(plain), keep, TypedReply(std::move(then)));
        };
        if (!replays) return train();
        // The engine reads the records, which may take long.
        front.bodies.Post(std::move(train), owner);
      },
      done);
}

int64_t TokensOf(const v1::ForwardBackwardRequest& request) {
  int64_t tokens = 0;
  for (const v1::Datum& datum : request.data()) {
    tokens += static_cast<int64_t>(datum.tokens_le().size() / sizeof(int32_t));
  }
  return tokens;
}

absl::Status StartTrain(Front& front, const CallOrigin& origin,
                        TrainBody* train, const StepDone& done) {
  WEFT_RETURN_IF_ERROR(train->request.status());
  v1::ForwardBackwardRequest& request = *train->request;
  v1::LossConfig* const loss = request.mutable_loss();
  const absl::StatusOr<engine::Engine*> engine = front.port.engine();
  loss->set_replay_routing(loss->replay_support() && engine.ok() &&
                           (*engine)->info().expert_layers > 0);
  if (!train->forward_only) {
    return CallTrain(front, origin, Rpc::kForwardBackward, request, done);
  }
  v1::ForwardRequest forward;
  forward.set_adapter_id(request.adapter_id());
  forward.set_step(request.step());
  *forward.mutable_data() = request.data();
  *forward.mutable_loss() = *loss;
  return CallTrain(front, origin, Rpc::kForward, forward, done);
}

// Puts the caller's loss into a step, and drops the inputs that the loss does
// not read. Errors: NOT_FOUND if there is no such loss, or its session ended.
absl::Status SetCustomLoss(Front& front, const Call& call,
                           const std::string& id,
                           v1::ForwardBackwardRequest* step) {
  WEFT_ASSIGN_OR_RETURN(const UploadedLoss* const uploaded,
                        front.losses.FindOf(call.owner(), id));
  v1::CustomLoss* const loss = step->mutable_loss()->mutable_custom_loss();
  if (!loss->ParseFromString(uploaded->loss)) {
    return absl::DataLossError(absl::StrCat("custom loss ", id, " is damaged"));
  }
  std::set<std::string> unread;
  for (v1::Datum& datum : *step->mutable_data()) {
    auto& inputs = *datum.mutable_custom_inputs();
    unread.clear();
    for (const auto& [name, value] : inputs) unread.insert(name);
    // The first input is the log-probabilities of the step itself. Data of RL
    // have a tensor of the same name, which the loss does not read.
    for (int i = 1; i < loss->inputs_size(); ++i) {
      const v1::CustomLossInput& input = loss->inputs(i);
      if (unread.erase(input.name()) == 0 || input.rank() != 1) continue;
      // The SDK sends no shape for a tensor that has one dimension by default.
      v1::CustomInput& value = inputs[input.name()];
      if (value.shape_size() > 0) continue;
      value.add_shape(
          static_cast<uint32_t>(value.floats_le().size() / sizeof(float) +
                                value.ints_le().size() / sizeof(int64_t)));
    }
    for (const std::string& name : unread) inputs.erase(name);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadTrain(const Front& front, Call* call) {
  WEFT_ASSIGN_OR_RETURN(const ForwardBackwardRequest in, ParseTrain(*call));
  const auto train = std::make_shared<TrainBody>();
  train->model = in.model_id();
  train->seq = in.seq_id();
  train->forward_only = in.forward_only();
  train->charge =
      front.port.core()->memory->Reserve(call->owner(), TranslationBytes(in));
  const absl::Status offered = in.loss_fn() == kStableReinforce
                                   ? front.CheckStableReinforce()
                                   : absl::OkStatus();
  if (!offered.ok()) {
    train->request = offered;
  } else if (train->charge.ok()) {
    train->request = TranslateTrain(in);
    train->loss_id = LossIdOf(in).value_or("");
  }
  call->train = train;
  return absl::OkStatus();
}

absl::Status RunForwardBackward(Front& front, const CallPtr& call,
                                const Respond& respond) {
  const std::shared_ptr<TrainBody> train = call->train;
  WEFT_RETURN_IF_ERROR(
      front.models.FindOf(call->owner(), train->model).status());
  WEFT_RETURN_IF_ERROR(train->charge.status());
  if (train->request.ok() && !train->loss_id.empty()) {
    const absl::Status set =
        SetCustomLoss(front, *call, train->loss_id, &*train->request);
    if (!set.ok()) train->request = set;
  }
  Json note = Json::object();
  if (train->request.ok()) {
    note[kTokens] = TokensOf(*train->request);
    train->request->set_adapter_id(AdapterOfModel(train->model));
    train->request->set_step(static_cast<uint64_t>(train->seq));
  }
  return PromiseStep(
      front, call, train->forward_only ? Rpc::kForward : Rpc::kForwardBackward,
      {.model = train->model, .seq = train->seq}, std::move(note),
      [&front, train](const CallOrigin& origin, const StepDone& done) {
        return StartTrain(front, origin, train.get(), done);
      },
      respond);
}

absl::Status RunOptimStep(Front& front, const CallPtr& call,
                          const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const StepPlace place, ReadPlace(call->body));
  auto request = RequestOf<v1::OptimStepRequest>(place);
  const absl::Status read = ReadOptimizerParams(call->body, &request);
  const auto start = [&front, model = place.model, request, read](
                         const CallOrigin& origin, const StepDone& done) {
    WEFT_RETURN_IF_ERROR(read);
    if (const Model* const found = front.models.Find(model)) {
      WEFT_RETURN_IF_ERROR(CheckOptimizerOf(*found, request));
    }
    return front.port.Submit(
        origin, Rpc::kOptimStep, request, [](auto* /*plain*/) {}, done);
  };
  return PromiseStep(front, call, Rpc::kOptimStep, place, Json::object(), start,
                     respond);
}

namespace {

// Reads the loss of a request, and returns it serialized.
absl::StatusOr<std::string> ReadLoss(const Json& body) {
  CustomLoss loss;
  WEFT_ASSIGN_OR_RETURN(const Json* const inputs,
                        List(body, "inputs", "inputs"));
  v1::CustomLoss out;
  for (const Json& input : *inputs) {
    if (!input.is_object()) return BadField("inputs", "must have objects");
    WEFT_ASSIGN_OR_RETURN(const std::string name, Text(input, "name"));
    WEFT_ASSIGN_OR_RETURN(const int64_t rank, Int(input, "rank"));
    if (rank < 0 || rank > 2) {
      return BadField("inputs.rank",
                      absl::StrCat("is ", rank, ", must be in [0, 2]"));
    }
    loss.inputs.push_back({.name = name, .rank = static_cast<int>(rank)});
    v1::CustomLossInput* const to = out.add_inputs();
    to->set_name(name);
    to->set_rank(static_cast<uint32_t>(rank));
  }
  WEFT_ASSIGN_OR_RETURN(const Json* const graph, Object(body, "graph"));
  loss.graph = graph->dump();
  const FieldNameScope names(ClientsNames());
  WEFT_RETURN_IF_ERROR(ReadLossGraph(loss).status());
  out.set_graph(std::move(loss.graph));
  return out.SerializeAsString();
}

absl::Status CheckRoom(const Front& front, const std::string& session) {
  const size_t count = front.losses.OfSession(session).size();
  if (count < kMaxLosses) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the session has ", count,
                   " custom losses, as many as it may: use one of them again, "
                   "with inputs in place of constants"));
}

// Adds the loss, writes it to the ledger, and then gives `done` its id.
absl::Status Keep(Front& front, const std::string& id, UploadedLoss loss,
                  const Callback<FutureResult>& done) {
  const auto end = [id, done](const absl::Status& put) {
    if (!put.ok()) return done(put);
    done(FutureResult::Of({{"type", "create_custom_loss"}, {"loss_id", id}}));
  };
  const std::string write = absl::StrCat("loss ", id);
  if (const UploadedLoss* const found = front.losses.Find(id)) {
    if (found->loss != loss.loss) {
      return absl::AlreadyExistsError(
          absl::StrCat("custom_loss_seq_id of ", id, " has another loss"));
    }
    if (!front.writes.Join(write, end)) end(absl::OkStatus());
    return absl::OkStatus();
  }
  WEFT_RETURN_IF_ERROR(CheckRoom(front, loss.session));
  WEFT_ASSIGN_OR_RETURN(loss.charge,
                        front.ledger.Charge(loss.owner, loss.loss.size()));
  const LedgerEntry entry = {
      .id = id, .fields = {{"session", loss.session}}, .bytes = loss.loss};
  front.losses.Add(id, std::move(loss));
  front.writes.Begin(write, end);
  front.ledger.Put(EntryKind::kLoss, entry,
                   [&front, id, write](const absl::Status& put) {
                     if (!put.ok()) front.losses.Take(id);
                     front.writes.End(write, put);
                   });
  return absl::OkStatus();
}

}  // namespace

absl::Status CreateCustomLoss(Front& front, const CallPtr& call,
                              const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(
      const Session* const found,
      front.sessions.FindOf(call->owner(), Text(call->body, "session_id")));
  const std::string session = found->id;
  WEFT_ASSIGN_OR_RETURN(const int64_t number,
                        Int(call->body, "custom_loss_seq_id"));
  const std::string name = absl::StrCat("loss-", number);
  return Promise(
      front, call, {.model = session, .seq = std::nullopt, .name = name},
      [&front, call, session,
       name](const Callback<FutureResult>& done) -> absl::Status {
        WEFT_ASSIGN_OR_RETURN(std::string loss, ReadLoss(call->body));
        return Keep(front, absl::StrCat(session, ":", name),
                    {.owner = call->owner(),
                     .session = session,
                     .loss = std::move(loss)},
                    done);
      },
      respond);
}

void DropLossesOf(Front& front, const std::string& session) {
  for (const std::string& id : front.losses.OfSession(session)) {
    front.ledger.Erase(EntryKind::kLoss, id);
    front.losses.Take(id);
  }
}

void RestoreLosses(Front& front, const std::string& session) {
  for (LedgerEntry& entry : front.ledger.ReadAll(EntryKind::kLoss, session)) {
    UploadedLoss loss{.session = entry.fields.value("session", ""),
                      .loss = std::move(entry.bytes)};
    if (!front.sessions.Has(loss.session)) {
      front.ledger.Erase(EntryKind::kLoss, entry.id);
      continue;
    }
    loss.owner = OwnerKey(front.CallerOf(loss.session));
    loss.charge = front.ledger.ChargeIfRoom(loss.owner, loss.loss.size());
    front.losses.Add(entry.id, std::move(loss));
  }
}

}  // namespace weft::server::tinker
