#include "client/adapter_handle.h"

#include <future>
#include <utility>

#include "client/connection.h"

namespace weft::client {
namespace {

template <typename Request>
Request Scoring(std::vector<v1::Datum> data, v1::LossConfig loss) {
  Request request;
  for (v1::Datum& datum : data) *request.add_data() = std::move(datum);
  *request.mutable_loss() = std::move(loss);
  return request;
}

}  // namespace

AdapterHandle::AdapterHandle(std::shared_ptr<Route> route, CallOptions options,
                             const v1::Adapter& adapter)
    : adapter_id_(adapter.adapter_id()),
      options_(std::move(options)),
      route_(std::move(route)),
      counter_(std::make_shared<StepCounter>(adapter.next_step() - 1,
                                             adapter.epoch())) {}

template <typename Request, typename Response>
Future<Reply<Response>> AdapterHandle::Submit(
    AsyncMethod<Training, Request, Response> method, Request request) {
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
  auto finish = [promise, counter = counter_,
                 step = number->step](absl::StatusOr<Reply<Response>> reply) {
    const absl::Status status =
        counter->Finish(step, OutcomeOfStep(reply.status()), reply.status());
    if (!status.ok()) reply = status;
    promise->set_value(std::move(reply));
  };
  const auto call =
      MakeCall(route_, method, std::move(request), options_, std::move(finish));
  counter_->SetCancel(number->step, [call] { call->Cancel(); });
  call->Start();
  return future;
}

Future<TrainReply> AdapterHandle::ForwardBackward(std::vector<v1::Datum> data,
                                                  v1::LossConfig loss) {
  return Submit(
      &Training::ForwardBackward,
      Scoring<v1::ForwardBackwardRequest>(std::move(data), std::move(loss)));
}

Future<ForwardReply> AdapterHandle::Forward(std::vector<v1::Datum> data,
                                            v1::LossConfig loss) {
  return Submit(&Training::Forward,
                Scoring<v1::ForwardRequest>(std::move(data), std::move(loss)));
}

Future<ForwardReply> AdapterHandle::Score(std::vector<v1::Datum> data,
                                          v1::LossConfig loss,
                                          absl::string_view snapshot) {
  auto request = Scoring<v1::ForwardRequest>(std::move(data), std::move(loss));
  request.set_adapter_id(adapter_id_);
  request.set_unnumbered(true);
  request.set_snapshot(std::string(snapshot));
  return Send(route_, &Training::Forward, std::move(request), options_);
}

Future<OptimReply> AdapterHandle::OptimStep(v1::AdamWConfig adamw) {
  v1::OptimStepRequest request;
  *request.mutable_adamw() = std::move(adamw);
  return Submit(&Training::OptimStep, std::move(request));
}

Future<OptimReply> AdapterHandle::ZeroGrad() {
  v1::OptimStepRequest request;
  request.set_discard(true);
  return Submit(&Training::OptimStep, std::move(request));
}

absl::Status AdapterHandle::Resync() {
  if (absl::Status idle = counter_->CheckIdle(); !idle.ok()) return idle;
  v1::GetAdapterRequest request;
  request.set_adapter_id(adapter_id_);
  const auto reply =
      Send(route_, &Adapters::GetAdapter, std::move(request), options_).get();
  if (!reply.ok()) return reply.status();
  counter_->Reset(reply->message.adapter().next_step() - 1,
                  reply->message.adapter().epoch());
  return absl::OkStatus();
}

}  // namespace weft::client
