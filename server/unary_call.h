// Runs a unary call. RunUnary checks the token and the quota, parses the
// request, checks the deadline, gets the engine, and validates the request.
// Then the engine runs the request. The engine's callback records the status
// and the metrics, and then sends the reply.
//
//   return RunUnary<StepReply<TrainResult>, v1::ForwardRequest,
//                   v1::ForwardResponse>(
//       core_, context, Rpc::kForward, request, response,
//       [](Engine& engine, TrainRequest plain, auto done) {
//         return engine.Train(std::move(plain), std::move(done));
//       },
//       [](const TrainResult& result, auto* out) { ToProto(result, out); });
#ifndef WEFT_SERVER_UNARY_CALL_H_
#define WEFT_SERVER_UNARY_CALL_H_

#include <memory>
#include <type_traits>
#include <utility>

#include "grpcpp/grpcpp.h"
#include "server/call.h"
#include "server/cancel_slot.h"

namespace weft {

// The reactor of a unary call. Threads: any; call Send or Fail exactly once.
// Ownership: shared by gRPC (until OnDone) and the engine's callback.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  [[nodiscard]] static std::shared_ptr<UnaryCall> Start(
      ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc,
      grpc::ByteBuffer* response) {
    auto call = std::make_shared<UnaryCall>(core, context, rpc, response);
    call->self_ = call;
    return call;
  }

  // Only Start calls this constructor.
  UnaryCall(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc,
            grpc::ByteBuffer* response)
      : record_(core, context, rpc), response_(*response) {
    record_.CountReceived();
  }

  [[nodiscard]] CallRecord& record() { return record_; }
  void SetCancel(CancelHandle handle) { cancel_.Set(std::move(handle)); }
  // Ends the call: with a reply, or with an error. The caller is charged for
  // the reply until its client has read it. Without room for it, the client
  // gets the error in its place, and may repeat the call: a step gives its
  // stored reply then.
  void Send(const google::protobuf::Message& reply) {
    const auto size = static_cast<int64_t>(reply.ByteSizeLong());
    const absl::Status held = record_.Hold(size);
    if (!held.ok()) return Fail(held);
    response_ = ToBytes(reply);
    record_.CountSent();
    record_.AwaitClient(size);
    Finish(record_.Close(absl::OkStatus()));
  }
  void Fail(const absl::Status& status) {
    record_.AwaitClient();
    Finish(record_.Close(status));
  }

 private:
  void OnCancel() override { cancel_.Cancel(); }
  void OnDone() override {
    cancel_.Clear();
    record_.Release();
    const std::shared_ptr<UnaryCall> self = std::move(self_);
  }

  CallRecord record_;
  grpc::ByteBuffer& response_;
  CancelSlot cancel_;
  std::shared_ptr<UnaryCall> self_;
};

// Passes a result and `out` to `fill`. The overload for StepReply passes
// reply.result, and marks the call as replayed if the engine returned a stored
// reply.
template <typename Result, typename Response, typename Fill>
void FillReply(CallRecord& /*record*/, const Result& result, const Fill& fill,
               Response* out) {
  fill(result, out);
}
template <typename Result, typename Response, typename Fill>
void FillReply(CallRecord& record, const StepReply<Result>& reply,
               const Fill& fill, Response* out) {
  if (reply.replayed) record.MarkReplayed();
  fill(reply.result, out);
}

// Runs a call. `start(Engine&, Plain, Callback<Result>)` returns a CancelHandle
// or nothing. `fill(const T&, Response*)` writes the response. If Result is
// StepReply<U>, T is U. Otherwise T is Result. Plain is the type that Validate
// returns for a Request. `bytes` and `response` are those of the raw handler.
template <typename Result, typename Request, typename Response,
          typename StartFn, typename FillFn>
grpc::ServerUnaryReactor* RunUnary(ServiceCore* core,
                                   grpc::CallbackServerContext* context,
                                   Rpc rpc, const grpc::ByteBuffer* bytes,
                                   grpc::ByteBuffer* response, StartFn start,
                                   FillFn fill) {
  const std::shared_ptr<UnaryCall> call =
      UnaryCall::Start(core, context, rpc, response);
  Request request;
  const auto charge = call->record().Parse(bytes, &request);
  if (!charge.ok()) {
    call->Fail(charge.status());
    return call.get();
  }
  Callback<Result> done = [call, fill](absl::StatusOr<Result> result) {
    if (!result.ok()) return call->Fail(result.status());
    call->record().caller()->Reveal(&*result);
    Response reply;
    FillReply(call->record(), *result, fill, &reply);
    call->Send(reply);
  };
  const absl::Status refused =
      call->record().Begin(request, [&](Engine& engine, auto plain) {
        using Started =
            decltype(start(engine, std::move(plain), std::move(done)));
        if constexpr (std::is_void_v<Started>) {
          start(engine, std::move(plain), std::move(done));
        } else {
          call->SetCancel(start(engine, std::move(plain), std::move(done)));
        }
      });
  if (!refused.ok()) {
    call->SetCancel(call->record().Refuse(
        request, refused,
        [call](const absl::Status& status) { call->Fail(status); }));
  }
  return call.get();
}

}  // namespace weft

#endif  // WEFT_SERVER_UNARY_CALL_H_
