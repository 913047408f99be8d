// Runs a unary call. The call reads and parses its request, checks the
// deadline, gets the engine, and validates the request. Then the engine runs
// the request. The engine's callback records the status and the metrics, and
// then sends the reply.
//
//   AddUnary<StepReply<TrainResult>, v1::ForwardRequest, v1::ForwardResponse>(
//       service, Rpc::kForward,
//       [](Engine& engine, TrainRequest plain, auto done) {
//         return engine.Train(std::move(plain), std::move(done));
//       },
//       [](const TrainResult& result, auto* out) { ToProto(result, out); });
#ifndef WEFT_SERVER_UNARY_CALL_H_
#define WEFT_SERVER_UNARY_CALL_H_

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

#include "server/call_reactor.h"
#include "server/raw_service.h"

namespace weft {

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

// `start` is a method of Engine or a function: it gets the engine, Plain and
// Callback<Result>, and returns a CancelHandle or nothing.
// `fill(const T&, Response*)` writes the response. If Result is StepReply<U>, T
// is U. Otherwise T is Result. Plain is the type that Validate returns for a
// Request.
template <typename Result, typename Request, typename Response,
          typename StartFn, typename FillFn>
class UnaryCall final : public RequestReactor<Request> {
 public:
  UnaryCall(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc,
            StartFn start, FillFn fill)
      : RequestReactor<Request>(core, context, rpc),
        start_(start),
        fill_(fill) {}

 private:
  void Run(const Request& request) override {
    Callback<Result> done =
        [this, call = this->self()](absl::StatusOr<Result> result) {
          result.ok() ? Reply(*std::move(result)) : this->End(result.status());
        };
    const absl::Status refused =
        this->record().Begin(request, [&](Engine& engine, auto plain) {
          const auto start = [&] {
            return std::invoke(start_, engine, std::move(plain),
                               std::move(done));
          };
          if constexpr (std::is_void_v<decltype(start())>) {
            start();
          } else {
            this->SetCancel(start());
          }
        });
    if (!refused.ok()) {
      this->SetCancel(this->record().Refuse(
          request, refused,
          [this, call = this->self()](const absl::Status& status) {
            this->End(status);
          }));
    }
  }

  void Reply(Result result) {
    this->record().caller()->Reveal(&result);
    Response reply;
    FillReply(this->record(), result, fill_, &reply);
    this->Send(reply);
  }

  const StartFn start_;
  const FillFn fill_;
};

template <typename Result, typename Request, typename Response,
          typename StartFn, typename FillFn>
void AddUnary(RawService* service, Rpc rpc, StartFn start, FillFn fill) {
  service->Add<UnaryCall<Result, Request, Response, StartFn, FillFn>>(
      rpc, start, fill);
}

}  // namespace weft

#endif  // WEFT_SERVER_UNARY_CALL_H_
