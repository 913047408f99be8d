// The bookkeeping that unary and streaming calls share.
#ifndef WEFT_SERVER_CALL_H_
#define WEFT_SERVER_CALL_H_

#include <string>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "server/caller.h"
#include "server/request_validation.h"
#include "server/service_core.h"
#include "src/base/trace_id.h"
#include "src/engine/engine.h"

namespace weft {

// What a call brings with it, the same for every protocol.
struct CallOrigin {
  // The caller. Errors: those of Authenticator::Check.
  absl::StatusOr<Caller> caller = Caller();
  std::string peer;
  absl::Time deadline = absl::InfiniteFuture();
  TraceId trace = MakeTraceId("", "");
};

// One call from its arrival to its status: metrics, log line, trailers.
// Threads: any. Settle or Close is called exactly once.
class CallRecord {
 public:
  // `core` outlives the call. `context` exists until the call's OnDone.
  CallRecord(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc);
  // Makes the record of a call that did not come by gRPC. context() is null.
  CallRecord(ServiceCore* core, CallOrigin origin, Rpc rpc);
  ~CallRecord();
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  // Returns the client's deadline; InfiniteFuture if there is none.
  [[nodiscard]] absl::Time deadline() const { return origin_.deadline; }

  // Returns the caller. Errors: those of Authenticator::Check, because a token
  // may be revoked between gRPC's check and this one.
  [[nodiscard]] const absl::StatusOr<Caller>& caller() const {
    return origin_.caller;
  }

  // Returns the engine for new work. Errors: those of caller();
  // RESOURCE_EXHAUSTED if the tenant has too many open calls; DEADLINE_EXCEEDED
  // if the deadline has passed; UNAVAILABLE while starting or draining.
  [[nodiscard]] absl::StatusOr<Engine*> Admit() const;

  // Returns the request in the engine's form: validated, with the engine's
  // names and the call's deadline. Call it after Admit.
  template <typename Request>
  [[nodiscard]] auto Read(const Engine& engine, const Request& request)
      -> decltype(Validate(request, RequestLimits())) {
    auto plain = Validate(request, limits(engine));
    if (!plain.ok()) return plain;
    const absl::Status own = caller()->Qualify(&*plain);
    if (!own.ok()) return own;
    if constexpr (requires { plain->deadline; }) plain->deadline = deadline();
    SetObject(*plain);
    const absl::Status spent = Spend(CostOf(*plain));
    if (!spent.ok()) return spent;
    return plain;
  }
  [[nodiscard]] RequestLimits limits(const Engine& engine) const;

  // Admits the call, reads its request and runs `start(Engine&, Plain)` with
  // the call's trace. Returns the refusal; OK if `start` ran.
  template <typename Request, typename StartFn>
  [[nodiscard]] absl::Status Begin(const Request& request, StartFn start) {
    const TraceScope scope(trace());
    const absl::StatusOr<Engine*> engine = Admit();
    if (!engine.ok()) return engine.status();
    auto plain = Read(**engine, request);
    if (!plain.ok()) return plain.status();
    start(**engine, *std::move(plain));
    return absl::OkStatus();
  }

  // Remembers the call's adapter for the audit line.
  template <typename Plain>
  void SetObject(const Plain& plain) {
    if constexpr (std::is_same_v<Plain, std::string>) {
      object_ = plain;
    } else if constexpr (requires { plain.adapter_id; }) {
      object_ = plain.adapter_id;
    } else if constexpr (requires { plain.first; }) {
      object_ = absl::StrCat(plain.first, "/", plain.second);
    }
  }

  // Count the call's messages.
  void CountReceived() { core_->metrics.Received(rpc_); }
  void CountSent() { core_->metrics.Sent(rpc_); }

  // Marks the reply as a stored reply.
  void MarkReplayed();

  // Counts and logs the outcome. From then on the quota does not count the
  // call. Returns the status with the caller's names.
  [[nodiscard]] absl::Status Settle(const absl::Status& status);
  // Like Settle, for a gRPC call. Returns the status for Finish.
  [[nodiscard]] grpc::Status Close(const absl::Status& status);

  // Returns the id of the call's log lines. Hold a TraceScope with it while the
  // engine takes the request.
  [[nodiscard]] const TraceId& trace() const { return origin_.trace; }
  [[nodiscard]] ServiceCore* core() const { return core_; }
  [[nodiscard]] grpc::CallbackServerContext* context() const {
    return context_;
  }

 private:
  CallRecord(ServiceCore* core, grpc::CallbackServerContext* context,
             CallOrigin origin, Rpc rpc);
  // Returns the tokens that count for the tenant's rate: the tokens to train
  // on, or the prompt's tokens plus all that may be drawn.
  template <typename Plain>
  [[nodiscard]] static int64_t CostOf(const Plain& plain) {
    if constexpr (requires { plain.num_tokens(); }) {
      return plain.num_tokens();
    } else if constexpr (requires { plain.num_samples; }) {
      return static_cast<int64_t>(plain.prompt.size()) +
             int64_t{plain.num_samples} * plain.config.max_tokens;
    } else {
      return 0;
    }
  }
  [[nodiscard]] absl::Status Spend(int64_t tokens) const;
  // Returns whether the quota counts this call, which is so if it has a token.
  [[nodiscard]] bool has_tenant() const {
    return caller().ok() && !caller()->tenant().empty();
  }
  void CountRefusal(const absl::Status& status);
  // Keeps the failure for people who watch.
  void NoteError(const absl::Status& status);
  // Logs what an operator may want to look up later: deletions, drains, and all
  // changes by an admin's token.
  void Audit(const absl::Status& status) const;

  ServiceCore* const core_;
  grpc::CallbackServerContext* const context_;
  const Rpc rpc_;
  const absl::Time start_;
  const CallOrigin origin_;
  absl::Status entered_;
  std::string object_;
};

}  // namespace weft

#endif  // WEFT_SERVER_CALL_H_
