// Calls the engine for the handlers of the Tinker API. A call passes the checks
// of a gRPC call (quotas, validation, adapter names), but not the check of
// scopes. It has the same metrics and log lines as a gRPC call (server/call.h).
// Its result comes back on the front's thread.
#ifndef WEFT_SERVER_TINKER_ENGINE_PORT_H_
#define WEFT_SERVER_TINKER_ENGINE_PORT_H_

#include <memory>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "server/call.h"
#include "server/tinker/http_server.h"

namespace weft::tinker {

// Threads: the front's, except Post. `core` outlives this object and all calls.
class EnginePort {
 public:
  EnginePort(ServiceCore* core, std::weak_ptr<HttpServer> server)
      : core_(core), server_(std::move(server)) {}

  [[nodiscard]] ServiceCore* core() const { return core_; }
  // Returns the engine. Errors: UNAVAILABLE while the engine starts or drains.
  [[nodiscard]] absl::StatusOr<Engine*> engine() const {
    return core_->engine.Get();
  }

  // Runs `work` on the front's thread. Does nothing if the HTTP server is gone.
  // Threads: any.
  void Post(std::function<void()> work) const {
    if (const auto live = server_.lock()) live->Post(std::move(work));
  }

  // Validates `request` and runs `start(Engine&, Plain, Callback<Result>)`,
  // where Plain is the type that Validate returns. If `start` returns a handle,
  // Call puts the handle into `*cancel`.
  // If the call fails before Call returns, Call returns the error, and `done`
  // does not run. The engine has then taken no work. But if the error carries
  // kStepDonePayload, the step is completed.
  // If Call returns OK, `done` runs exactly once on the front's thread, perhaps
  // before Call returns. `done` does not run if the HTTP server stops first.
  template <typename Result, typename Request, typename StartFn>
  [[nodiscard]] absl::Status Call(CallOrigin origin, Rpc rpc,
                                  const Request& request, StartFn start,
                                  Callback<Result> done,
                                  CancelHandle* cancel = nullptr) const {
    const auto call =
        std::make_shared<Pending<Result>>(core_, std::move(origin), rpc);
    const TraceScope scope(call->record.trace());
    const absl::StatusOr<Engine*> engine = call->record.Admit();
    if (!engine.ok()) return call->record.Settle(engine.status());
    auto plain = call->record.Read(**engine, request);
    if (!plain.ok()) return call->record.Settle(plain.status());
    auto deliver = Deliver<Result>(call, std::move(done));
    if constexpr (std::is_void_v<decltype(start(**engine, *std::move(plain),
                                                deliver))>) {
      start(**engine, *std::move(plain), std::move(deliver));
    } else {
      CancelHandle handle =
          start(**engine, *std::move(plain), std::move(deliver));
      if (cancel != nullptr) *cancel = std::move(handle);
    }
    return Return(call.get());
  }

  // Like Call, for a request that Validate would refuse. `plain` is not
  // validated and has the caller's names for adapters. The tenant's limits on
  // calls and tokens do not apply: other calls of the tenant may fill these
  // limits and wait for this one.
  template <typename Result, typename Plain, typename StartFn>
  [[nodiscard]] absl::Status CallUnmetered(CallOrigin origin, Rpc rpc,
                                           Plain plain, StartFn start,
                                           Callback<Result> done) const {
    const auto call =
        std::make_shared<Pending<Result>>(core_, std::move(origin), rpc);
    const TraceScope scope(call->record.trace());
    const absl::StatusOr<Engine*> engine = core_->engine.Get();
    if (!engine.ok()) return call->record.Settle(engine.status());
    const absl::Status own = call->record.caller()->Qualify(&plain);
    if (!own.ok()) return call->record.Settle(own);
    start(**engine, std::move(plain), Deliver<Result>(call, std::move(done)));
    return Return(call.get());
  }

 private:
  template <typename Result>
  struct Pending {
    Pending(ServiceCore* core, CallOrigin origin, Rpc rpc)
        : record(core, std::move(origin), rpc) {}
    CallRecord record;
    // The front's thread. The engine's threads compare it with their own. Only
    // the front's thread reads or writes the members below.
    const std::thread::id thread = std::this_thread::get_id();
    bool returned = false;
    std::function<absl::Status()> early;
  };

  // Counts and logs the outcome of a call. Puts the caller's names for adapters
  // into `*result`, and into the status that it returns.
  template <typename Result>
  static absl::Status SettleResult(Pending<Result>* call,
                                   absl::StatusOr<Result>* result) {
    if (result->ok()) call->record.caller()->Reveal(&**result);
    absl::Status status = call->record.Settle(result->status());
    if (const auto done = result->status().GetPayload(kStepDonePayload)) {
      status.SetPayload(kStepDonePayload, *done);
    }
    return status;
  }

  // Returns the callback for the engine. The callback passes the result to
  // `done` on the front's thread. But if the engine runs the callback within
  // Call, the callback leaves the result in `early` for Return.
  template <typename Result>
  Callback<Result> Deliver(std::shared_ptr<Pending<Result>> call,
                           Callback<Result> done) const {
    return [call, done = std::move(done),
            server = server_](absl::StatusOr<Result> result) {
      const absl::Status status = SettleResult(call.get(), &result);
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

  // Ends Call. If the result has come already, runs `done` with it, or returns
  // its error.
  template <typename Result>
  static absl::Status Return(Pending<Result>* call) {
    call->returned = true;
    const auto early = std::exchange(call->early, nullptr);
    return early ? early() : absl::OkStatus();
  }

  ServiceCore* const core_;
  const std::weak_ptr<HttpServer> server_;
};

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ENGINE_PORT_H_
