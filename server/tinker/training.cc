#include "server/tinker/training.h"

#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "server/field_checks.h"
#include "server/tinker/custom_losses.h"
#include "server/tinker/models.h"
#include "server/tinker/optimizers.h"
#include "server/tinker/step_output.h"
#include "server/tinker/steps.h"
#include "server/tinker/train_wire.h"
#include "server/tinker/usage.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
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

// Starts the step in the engine. `Message` is ForwardBackwardRequest or
// ForwardRequest, which have the same fields.
template <typename Message>
absl::Status StartTrain(Front& front, const CallOrigin& origin, Rpc rpc,
                        const v1::ForwardBackwardRequest& train,
                        const Callback<FutureResult>& done) {
  Message request;
  request.set_adapter_id(train.adapter_id());
  request.set_step(train.step());
  *request.mutable_data() = train.data();
  *request.mutable_loss() = train.loss();
  const absl::StatusOr<Engine*> engine = front.port.engine();
  request.mutable_loss()->set_replay_routing(
      train.loss().replay_support() && engine.ok() &&
      (*engine)->info().expert_layers > 0);
  int64_t tokens = 0;
  for (const v1::Datum& datum : train.data()) {
    tokens += static_cast<int64_t>(datum.tokens_le().size() / sizeof(int32_t));
  }
  return front.port.CallWith<StepReply<TrainResult>>(
      origin, rpc, request,
      [](Engine& port, TrainRequest plain, auto then) {
        // Without a record the client's own values serve.
        plain.replay.optional = true;
        port.Train(std::move(plain), std::move(then));
      },
      [&front, owner = OwnerKey(*origin.caller), tokens,
       session = front.SessionOf(ModelOfAdapter(train.adapter_id())),
       done](const absl::StatusOr<StepReply<TrainResult>>& reply) {
        if (!reply.ok()) return done(reply.status());
        if (!reply->replayed) {
          CountUsage(front, owner, session, {.train_tokens = tokens});
        }
        done(OutputOf("", reply->result));
      });
}

absl::Status StartOptim(Front& front, const CallOrigin& origin,
                        const v1::OptimStepRequest& request,
                        const Callback<FutureResult>& done) {
  return front.port.Call(
      origin, Rpc::kOptimStep, request, &Engine::OptimStep,
      [done](const absl::StatusOr<StepReply<OptimStepResult>>& reply) {
        if (!reply.ok()) return done(reply.status());
        done(OutputOf("", reply->result));
      });
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
  WEFT_RETURN_IF_ERROR(front.FindModel(*call, train->model).status());
  // PromiseStep charges for what the step keeps.
  WEFT_ASSIGN_OR_RETURN(const std::shared_ptr<void> charge,
                        std::move(train->charge));
  if (train->request.ok() && !train->loss_id.empty()) {
    const absl::Status set =
        SetCustomLoss(front, *call, train->loss_id, &*train->request);
    if (!set.ok()) train->request = set;
  }
  int64_t bytes = 0;
  if (train->request.ok()) {
    train->request->set_adapter_id(AdapterOfModel(train->model));
    train->request->set_step(static_cast<uint64_t>(train->seq));
    bytes = static_cast<int64_t>(train->request->SpaceUsedLong());
  }
  const Rpc rpc = train->forward_only ? Rpc::kForward : Rpc::kForwardBackward;
  return PromiseStep(
      front, call, rpc, train->model, train->seq, bytes,
      [&front, origin = call->origin(), train,
       rpc](const Callback<FutureResult>& done) {
        if (!train->request.ok()) return train->request.status();
        return train->forward_only
                   ? StartTrain<v1::ForwardRequest>(front, origin, rpc,
                                                    *train->request, done)
                   : StartTrain<v1::ForwardBackwardRequest>(
                         front, origin, rpc, *train->request, done);
      },
      respond);
}

absl::Status RunOptimStep(Front& front, const CallPtr& call,
                          const Respond& respond) {
  WEFT_ASSIGN_OR_RETURN(const std::string model,
                        StringField(call->body, "model_id"));
  WEFT_ASSIGN_OR_RETURN(const int64_t seq, IntField(call->body, "seq_id"));
  v1::OptimStepRequest request;
  request.set_adapter_id(AdapterOfModel(model));
  request.set_step(static_cast<uint64_t>(seq));
  const absl::Status read = ReadOptimizerParams(call->body, &request);
  return PromiseStep(
      front, call, Rpc::kOptimStep, model, seq, /*bytes=*/0,
      [&front, origin = call->origin(), model, request,
       read](const Callback<FutureResult>& done) {
        WEFT_RETURN_IF_ERROR(read);
        const auto found = front.models.find(model);
        if (found != front.models.end()) {
          WEFT_RETURN_IF_ERROR(CheckOptimizerOf(found->second, request));
        }
        return StartOptim(front, origin, request, done);
      },
      respond);
}

}  // namespace weft::tinker
