// Runs a unary call. RunUnary checks the token, the quota and the deadline,
// gets the engine, and validates the request. Then the engine runs the request.
// The engine's callback records the status and the metrics, and then sends the
// reply.
//
//   return RunUnary<StepReply<TrainResult>>(
//       core_, context, Rpc::kForward, *request, response,
//       [](Engine& engine, TrainRequest plain, auto done) {
//         return engine.Train(std::move(plain), std::move(done));
//       },
//       [response](const TrainResult& result) { ToProto(result, response); });
#ifndef WEFT_SERVER_UNARY_CALL_H_
#define WEFT_SERVER_UNARY_CALL_H_

#include <memory>
#include <type_traits>
#include <utility>

#include "grpcpp/grpcpp.h"
#include "server/call.h"
#include "server/cancel_slot.h"

namespace weft {

// The reactor of a unary call. Threads: any; Reply is called exactly once.
// Ownership: shared by gRPC (until OnDone) and the engine's callback.
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  [[nodiscard]] static std::shared_ptr<UnaryCall> Start(
      ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc) {
    auto call = std::make_shared<UnaryCall>(core, context, rpc);
    call->self_ = call;
    return call;
  }

  // Only Start calls this constructor.
  UnaryCall(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc)
      : record_(core, context, rpc) {
    record_.CountReceived();
  }

  [[nodiscard]] CallRecord& record() { return record_; }
  void SetCancel(CancelHandle handle) { cancel_.Set(std::move(handle)); }
  // `bytes` is the size of the reply.
  void Reply(const absl::Status& status, int64_t bytes = 0) {
    if (status.ok()) record_.CountSent();
    record_.AwaitClient(bytes);
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
  CancelSlot cancel_;
  std::shared_ptr<UnaryCall> self_;
};

// Passes a result to `fill`. The overload for StepReply passes reply.result,
// and marks the call as replayed if the engine returned a stored reply.
template <typename Result, typename Fill>
void FillReply(CallRecord& /*record*/, const Result& result, const Fill& fill) {
  fill(result);
}
template <typename Result, typename Fill>
void FillReply(CallRecord& record, const StepReply<Result>& reply,
               const Fill& fill) {
  if (reply.replayed) record.MarkReplayed();
  fill(reply.result);
}

// Charges the caller for a reply, of which gRPC holds the message and its bytes
// until the client has read them. Without room for them the caller gets the
// error in place of the reply, and may repeat the call: a step gives its stored
// reply then.
inline absl::Status HoldReply(CallRecord& record,
                              google::protobuf::MessageLite* response) {
  const absl::Status held =
      record.Hold(2 * static_cast<int64_t>(response->ByteSizeLong()));
  if (!held.ok()) response->Clear();
  return held;
}

// Runs a call. `start(Engine&, Plain, Callback<Result>)` returns a CancelHandle
// or nothing. `fill(const T&)` writes `response`. If Result is StepReply<U>,
// T is U. Otherwise T is Result. Plain is the type that Validate returns for
// `request`.
template <typename Result, typename Request, typename StartFn, typename FillFn>
grpc::ServerUnaryReactor* RunUnary(ServiceCore* core,
                                   grpc::CallbackServerContext* context,
                                   Rpc rpc, const Request& request,
                                   google::protobuf::MessageLite* response,
                                   StartFn start, FillFn fill) {
  const std::shared_ptr<UnaryCall> call = UnaryCall::Start(core, context, rpc);
  Callback<Result> done = [call, response,
                           fill](absl::StatusOr<Result> result) {
    absl::Status status = result.status();
    if (status.ok()) {
      call->record().caller()->Reveal(&*result);
      FillReply(call->record(), *result, fill);
      status = HoldReply(call->record(), response);
    }
    call->Reply(status, static_cast<int64_t>(response->ByteSizeLong()));
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
        [call](const absl::Status& status) { call->Reply(status); }));
  }
  return call.get();
}

}  // namespace weft

#endif  // WEFT_SERVER_UNARY_CALL_H_
