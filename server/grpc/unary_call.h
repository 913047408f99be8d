// Runs a unary call. The call reads and parses its request, checks the
// deadline, gets the engine, and validates the request. Then the engine runs
// the request. The engine's callback records the status and the metrics, and
// then sends the reply.
//
//   AddUnary<v1::ForwardRequest, v1::ForwardResponse>(
//       service, Rpc::kForward, &Engine::Train);
#ifndef WEFT_SERVER_GRPC_UNARY_CALL_H_
#define WEFT_SERVER_GRPC_UNARY_CALL_H_

#include <functional>
#include <type_traits>
#include <utility>

#include "server/grpc/call_reactor.h"
#include "server/grpc/raw_service.h"
#include "server/wire/response_conversion.h"

namespace weft::server {

// `start` is a method of Engine or a function: it gets the engine, what
// Validate returns for a Request, and a callback. It returns a CancelHandle or
// nothing. ToProto writes the result, or that of a StepReply, to the response,
// unless it is a bool, which says nothing.
template <typename Request, typename Response, typename StartFn>
class UnaryCall final : public RequestReactor<Request> {
 public:
  UnaryCall(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc,
            StartFn start)
      : RequestReactor<Request>(core, context, rpc), start_(start) {}

 private:
  void Run(const Request& request) override {
    const absl::Status refused =
        this->record().Begin(request, [&](engine::Engine& engine, auto plain) {
          const auto start = [&] {
            return std::invoke(
                start_, engine, std::move(plain),
                [this, call = this->self()](auto result) -> void {
                  result.ok() ? Reply(*std::move(result))
                              : this->End(result.status());
                });
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

  template <typename Result>
  void Reply(Result result) {
    this->record().caller()->Reveal(&result);
    Response reply;
    if constexpr (requires { result.replayed; }) {
      if (result.replayed) this->record().MarkReplayed();
      ToProto(result.result, &reply);
    } else if constexpr (!std::is_same_v<Result, bool>) {
      ToProto(result, &reply);
    }
    this->Send(reply);
  }

  const StartFn start_;
};

template <typename Request, typename Response, typename StartFn>
void AddUnary(RawService* service, Rpc rpc, StartFn start) {
  service->Add<UnaryCall<Request, Response, StartFn>>(rpc, start);
}

}  // namespace weft::server

#endif  // WEFT_SERVER_GRPC_UNARY_CALL_H_
