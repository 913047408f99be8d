#include "client/adapter_handle.h"

#include <utility>

#include "client/connection.h"
#include "src/base/clock.h"

namespace weft::client {
namespace {

v1::ForwardRequest ForwardRequestOf(std::vector<v1::Datum> data,
                                    v1::LossConfig loss) {
  v1::ForwardRequest request;
  for (v1::Datum& datum : data) *request.add_data() = std::move(datum);
  *request.mutable_loss() = std::move(loss);
  return request;
}

}  // namespace

AdapterHandle::AdapterHandle(std::shared_ptr<Connection> connection,
                             CallOptions options, const v1::Adapter& adapter)
    : adapter_id_(adapter.adapter_id()),
      options_(std::move(options)),
      connection_(std::move(connection)),
      counter_(std::make_shared<StepCounter>(adapter.next_step() - 1,
                                             adapter.epoch())) {}

template <typename Request, typename Response>
Future<Reply<Response>> AdapterHandle::Submit(
    void (v1::TrainingService::Stub::async::*method)(
        grpc::ClientContext*, const Request*, Response*,
        std::function<void(grpc::Status)>),
    Request request) {
  auto promise =
      std::make_shared<std::promise<absl::StatusOr<Reply<Response>>>>();
  Future<Reply<Response>> future = promise->get_future();
  const absl::StatusOr<StepNumber> number = counter_->Take();
  if (!number.ok()) {
    promise->set_value(number.status());
    return future;
  }
  request.set_adapter_id(adapter_id_);
  request.set_step(number->step);
  request.set_epoch(number->epoch);
  auto start = [connection = connection_, method](
                   grpc::ClientContext* context, const Request* sent,
                   Response* response, std::function<void(grpc::Status)> done) {
    (connection->training().async()->*method)(context, sent, response,
                                              std::move(done));
  };
  auto finish = [promise, counter = counter_,
                 step = number->step](absl::StatusOr<Reply<Response>> reply) {
    const absl::Status status =
        counter->Finish(step, OutcomeOfStep(reply.status()), reply.status());
    if (!status.ok()) reply = status;
    promise->set_value(std::move(reply));
  };
  auto call = std::make_shared<UnaryCall<Request, Response>>(
      std::move(start), std::move(request), options_, std::move(finish),
      StepPlace{.counter = counter_, .number = number->step});
  counter_->SetWake(number->step, [call] { call->Wake(); });
  counter_->SetCancel(number->step, [call] { call->Cancel(); });
  call->Start();
  return future;
}

Future<TrainReply> AdapterHandle::ForwardBackward(std::vector<v1::Datum> data,
                                                  v1::LossConfig loss) {
  v1::ForwardBackwardRequest request;
  for (v1::Datum& datum : data) *request.add_data() = std::move(datum);
  *request.mutable_loss() = std::move(loss);
  return Submit(&v1::TrainingService::Stub::async::ForwardBackward,
                std::move(request));
}

Future<ForwardReply> AdapterHandle::Forward(std::vector<v1::Datum> data,
                                            v1::LossConfig loss) {
  return Submit(&v1::TrainingService::Stub::async::Forward,
                ForwardRequestOf(std::move(data), std::move(loss)));
}

Future<ForwardReply> AdapterHandle::Score(std::vector<v1::Datum> data,
                                          v1::LossConfig loss,
                                          absl::string_view snapshot) {
  auto request = ForwardRequestOf(std::move(data), std::move(loss));
  request.set_adapter_id(adapter_id_);
  request.set_unnumbered(true);
  request.set_snapshot(std::string(snapshot));
  auto promise = std::make_shared<std::promise<absl::StatusOr<ForwardReply>>>();
  auto start = [connection = connection_](
                   grpc::ClientContext* context, const v1::ForwardRequest* sent,
                   v1::ForwardResponse* response,
                   std::function<void(grpc::Status)> done) {
    connection->training().async()->Forward(context, sent, response,
                                            std::move(done));
  };
  auto finish = [promise](absl::StatusOr<ForwardReply> reply) {
    promise->set_value(std::move(reply));
  };
  using Call = UnaryCall<v1::ForwardRequest, v1::ForwardResponse>;
  std::make_shared<Call>(std::move(start), std::move(request), options_,
                         std::move(finish))
      ->Start();
  return promise->get_future();
}

Future<OptimReply> AdapterHandle::OptimStep(v1::AdamWConfig adamw) {
  v1::OptimStepRequest request;
  *request.mutable_adamw() = std::move(adamw);
  return Submit(&v1::TrainingService::Stub::async::OptimStep,
                std::move(request));
}

absl::Status AdapterHandle::Resync() {
  if (absl::Status idle = counter_->CheckIdle(); !idle.ok()) return idle;
  grpc::ClientContext context;
  context.set_deadline(ToGrpcTime(SteadyNow() + options_.timeout));
  AddCallMetadata(context, options_.token, adapter_id_);
  v1::GetAdapterRequest request;
  request.set_adapter_id(adapter_id_);
  v1::GetAdapterResponse response;
  const grpc::Status status =
      connection_->adapters().GetAdapter(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  counter_->Reset(response.adapter().next_step() - 1,
                  response.adapter().epoch());
  return absl::OkStatus();
}

}  // namespace weft::client
