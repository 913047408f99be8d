// Calls the engine for the handlers of an HTTP server, with the metrics and log
// lines of a gRPC call (server/call/call.h). Results come back on the HTTP
// server's thread. These calls do not check scopes, because the handlers'
// routes do.
#ifndef WEFT_SERVER_CALL_ENGINE_PORT_H_
#define WEFT_SERVER_CALL_ENGINE_PORT_H_

#include <functional>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/types/span.h"
#include "server/call/call.h"
#include "server/http/server.h"
#include "src/request/field_names.h"

namespace weft::server {

// REQUIRES: `core` outlives this object and all calls.
// Threads: the HTTP server's for CallWith, Call and RefuseStep; any for the
// others.
class EnginePort {
 public:
  // `field_names` are those that the server's clients use, if they differ from
  // those of weft.v1. They outlive all calls.
  EnginePort(ServiceCore* core, std::weak_ptr<HttpServer> server,
             absl::Span<const FieldName> field_names = {})
      : core_(core), server_(std::move(server)), field_names_(field_names) {}

  ServiceCore* core() const { return core_; }
  // Returns the engine. Errors: UNAVAILABLE while the engine starts or drains.
  absl::StatusOr<engine::Engine*> engine() const { return core_->engine.Get(); }

  // Runs `work` on the HTTP server's thread. Does nothing if the HTTP server is
  // gone.
  void Post(std::function<void()> work) const {
    if (const auto live = server_.lock()) live->Post(std::move(work));
  }

  // Does for HTTP what unary_call.h does for gRPC: checks the tenant's rate of
  // tokens, validates `request`, and runs `start(Engine&, Plain,
  // Callback<Result>)`. Plain is the type that Validate returns. If CallWith
  // returns an error, `done` does not run, and the engine does no more work for
  // the call. If CallWith returns OK, `done` runs once on the HTTP server's
  // thread, perhaps before CallWith returns. If the HTTP server stops first,
  // `done` does not run.
  template <typename Result, typename Request, typename StartFn>
  absl::Status CallWith(CallOrigin origin, Rpc rpc, const Request& request,
                        StartFn start, Callback<Result> done) const {
    origin.counted = true;
    const auto call =
        std::make_shared<Pending<Result>>(core_, std::move(origin), rpc);
    const Callback<Result> deliver = Deliver<Result>(call, std::move(done));
    const FieldNameScope names(field_names_);
    const absl::Status refused =
        call->record.Begin(request, [&](engine::Engine& engine, auto plain) {
          start(engine, std::move(plain), deliver);
        });
    if (!refused.ok()) {
      call->record.Refuse(
          request, refused,
          [deliver](const absl::Status& status) { deliver(status); });
    }
    return Return(call.get());
  }

  // Like CallWith, for a method of the engine.
  template <typename Return, typename Plain, typename Result, typename Request>
  absl::Status Call(CallOrigin origin, Rpc rpc, const Request& request,
                    Return (engine::Engine::*method)(Plain, Callback<Result>),
                    std::type_identity_t<Callback<Result>> done) const {
    return CallWith<Result>(
        std::move(origin), rpc, request,
        [method](engine::Engine& engine, Plain plain, Callback<Result> then) {
          (engine.*method)(std::move(plain), std::move(then));
        },
        std::move(done));
  }

  // Like CallWith, for a step, which the engine keeps as origin.keep says.
  // `adjust` may change the validated request.
  template <typename Request, typename AdjustFn>
  absl::Status Submit(const CallOrigin& origin, Rpc rpc, const Request& request,
                      AdjustFn adjust,
                      Callback<StepReply<StepResultPtr>> done) const {
    return CallWith<StepReply<StepResultPtr>>(
        origin, rpc, request,
        [keep = origin.keep, adjust](engine::Engine& engine, auto plain,
                                     auto then) {
          adjust(&plain);
          engine.Submit(std::move(plain), keep, TypedReply(std::move(then)));
        },
        std::move(done));
  }

  // Does what CallRecord::AcceptRefused does. Returns an error if the engine
  // does not accept the step; then `done` does not run.
  absl::Status RefuseStep(CallOrigin origin, Rpc rpc, RefusedStep refused,
                          Callback<bool> done) const {
    origin.counted = true;
    const auto call =
        std::make_shared<Pending<bool>>(core_, std::move(origin), rpc);
    call->record.AcceptRefused(
        std::move(refused),
        [deliver = Deliver<bool>(call, std::move(done))](
            const absl::Status& status) { deliver(status); });
    return Return(call.get());
  }

  // Gives `done` the result of a step when the step has ended, on the front's
  // thread, perhaps before this method returns. Errors: those of
  // Engine::Retrieve. REQUIRES: origin.caller is OK; the engine is ready.
  void Retrieve(const CallOrigin& origin, std::string adapter_id, uint64_t step,
                Callback<StepResultPtr> done) const {
    const absl::Status own = origin.caller->Qualify(FieldsOf(&adapter_id));
    if (!own.ok()) return done(own);
    core_->engine.Peek()->Retrieve(
        std::move(adapter_id), step,
        [port = *this,
         done = std::move(done)](const absl::StatusOr<StepResultPtr>& result) {
          port.Post([done, result] { done(result); });
        });
  }

 private:
  template <typename Result>
  struct Pending {
    Pending(ServiceCore* core, CallOrigin origin, Rpc rpc)
        : record(core, std::move(origin), rpc) {}
    CallRecord record;
    // The thread that calls the engine. Only this thread reads or writes the
    // members below.
    const std::thread::id thread = std::this_thread::get_id();
    bool returned = false;
    std::function<absl::Status()> early;
  };

  // Counts and logs the outcome of a call, and returns its status. Changes the
  // engine's adapter names to the caller's, in `*result` and in the status.
  template <typename Result>
  static absl::Status FinishWithResult(Pending<Result>* call,
                                       absl::StatusOr<Result>* result) {
    if (result->ok()) call->record.caller()->Reveal(&**result);
    absl::Status status = call->record.FinishCall(result->status());
    if (const auto done = result->status().GetPayload(kStepDonePayload)) {
      status.SetPayload(kStepDonePayload, *done);
    }
    return status;
  }

  // Returns the callback for the engine. The callback posts the result to
  // `done` on the HTTP server's thread. But if the callback runs before Return
  // on the thread that calls the engine, the callback leaves the result in
  // `early`.
  template <typename Result>
  Callback<Result> Deliver(std::shared_ptr<Pending<Result>> call,
                           Callback<Result> done) const {
    return [call, done = std::move(done),
            server = server_](absl::StatusOr<Result> result) {
      const absl::Status status = FinishWithResult(call.get(), &result);
      if (!status.ok()) result = status;
      auto shared = std::make_shared<absl::StatusOr<Result>>(std::move(result));
      const auto run = [done, shared] { done(std::move(*shared)); };
      if (std::this_thread::get_id() == call->thread && !call->returned) {
        call->early = [status, run] {
          if (status.ok()) run();
          return status;
        };
      } else if (const auto live = server.lock()) {
        live->Post(run);
      }
    };
  }

  // Ends a call. If a result is in `early`, runs `done` with the
  // result. If an error is in `early`, returns the error.
  template <typename Result>
  static absl::Status Return(Pending<Result>* call) {
    call->returned = true;
    const auto early = std::exchange(call->early, nullptr);
    return early ? early() : absl::OkStatus();
  }

  ServiceCore* const core_;
  const std::weak_ptr<HttpServer> server_;
  const absl::Span<const FieldName> field_names_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_ENGINE_PORT_H_
