// Counts, limits and logs the calls of gRPC and of the Tinker API.
#ifndef WEFT_SERVER_CALL_CALL_H_
#define WEFT_SERVER_CALL_CALL_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "google/protobuf/message.h"
#include "grpcpp/grpcpp.h"
#include "server/call/caller.h"
#include "server/call/service_core.h"
#include "server/wire/request_fields.h"
#include "server/wire/request_validation.h"
#include "server/wire/status_conversion.h"
#include "src/base/status_macros.h"
#include "src/base/trace_id.h"
#include "src/engine/engine.h"
#include "src/request/request_bytes.h"

namespace weft::server {

// Returns the digest of a refused message: equal ones have equal digests.
std::string DigestOf(const google::protobuf::MessageLite& message);

// Serializes a message for a CallReactor.
grpc::ByteBuffer ToBytes(const google::protobuf::Message& message);

// The calls that a connection of gRPC may have under way.
inline constexpr int kMaxCallsPerConnection = 1024;

// A request with a place in its adapter's order of steps.
template <typename Request>
concept NumberedRequest = requires(const Request& request) {
  request.adapter_id();
  request.step();
  request.epoch();
};

// The caller, address, deadline and trace id of a call.
struct CallOrigin {
  // The caller, or the error of Authenticator::Check.
  absl::StatusOr<Caller> caller = Caller();
  std::string peer;
  absl::Time deadline = absl::InfiniteFuture();
  TraceId trace = MakeTraceId("", "");
  // The front that got the call counts its requests and charges for their
  // bytes, so the quota does not count the call.
  bool counted = false;
  // What the front has charged for a sample's request. Null: Read charges.
  std::shared_ptr<void> charge = nullptr;
  KeepStep keep = {};  // How the engine keeps the step of the call.
};

// Follows one call from its arrival to its status. Updates the metrics and the
// tenant's quota, sets the trailers, and writes the log line.
// Threads: any, one at a time. Call FinishCall or Close exactly once.
class CallRecord {
 public:
  // REQUIRES: `core` outlives the call; `context` lives until the call's
  // OnDone.
  CallRecord(ServiceCore* core, grpc::CallbackServerContext* context, Rpc rpc);
  // Makes the record of a call of the Tinker API. context() is null.
  CallRecord(ServiceCore* core, CallOrigin origin, Rpc rpc);
  ~CallRecord();
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  // Returns the client's deadline; InfiniteFuture if there is none.
  absl::Time deadline() const { return origin_.deadline; }

  // Returns the caller. Errors: those of Authenticator::Check, because a token
  // may be revoked after gRPC has checked it.
  const absl::StatusOr<Caller>& caller() const { return origin_.caller; }

  // Returns whether the call may go on. Errors: those of caller();
  // RESOURCE_EXHAUSTED if the tenant has too many open calls; those of Hold.
  const absl::Status& entered() const { return entered_; }

  const std::string& peer() const { return origin_.peer; }
  // Returns the size limit of the method's requests.
  int64_t MostRequestBytes() const;

  // Parses a request, and frees its bytes. Returns the charge to the caller's
  // memory, which the caller of Parse holds as long as the message. Errors, all
  // before the memory is taken: RESOURCE_EXHAUSTED with reason TOO_LARGE above
  // MostRequestBytes; those of ParsedBytes and Hold. REQUIRES: entered() is OK.
  absl::StatusOr<std::shared_ptr<void>> Parse(
      grpc::ByteBuffer* bytes, google::protobuf::Message* request);

  // Returns the engine for the call. Errors: those of entered();
  // DEADLINE_EXCEEDED if the deadline has passed; UNAVAILABLE while the daemon
  // starts, and while it drains if the call is new work.
  absl::StatusOr<engine::Engine*> Admit() const;

  // Validates the request and returns it in the engine's form, with the
  // engine's names of adapters and the call's deadline (if the form has a
  // deadline). Charges the caller for the result until the call ends, and for
  // the request of a step or a sample as long as the request exists. Counts the
  // request's tokens against the tenant's rate, until the call ends without
  // work for the engine. REQUIRES: caller() is OK. Errors: those of Validate,
  // Qualify, Hold, Charge and Spend.
  template <typename Request>
  auto Read(const engine::Engine& engine, const Request& request)
      -> decltype(Validate(request, RequestLimits())) {
    auto plain = Validate(request, limits(engine));
    if (!plain.ok()) return plain;
    const RequestFields fields = FieldsOf(&*plain);
    WEFT_RETURN_IF_ERROR(Take(fields));
    if (fields.deadline != nullptr) *fields.deadline = deadline();
    if constexpr (requires { plain->charge; }) {
      WEFT_RETURN_IF_ERROR(Charge(engine, &*plain));
    }
    WEFT_RETURN_IF_ERROR(HoldResult(fields, engine.info()));
    WEFT_RETURN_IF_ERROR(Spend(fields.cost));
    return plain;
  }
  RequestLimits limits(const engine::Engine& engine) const;

  // In a TraceScope of the call, calls Admit and Read, then `start` with the
  // engine and the result of Read. Errors: those of Admit and Read. After an
  // error, `start` does not run.
  template <typename Request, typename StartFn>
  absl::Status Begin(const Request& request, StartFn start) {
    const TraceScope scope(trace());
    WEFT_ASSIGN_OR_RETURN(engine::Engine* const engine, Admit());
    WEFT_ASSIGN_OR_RETURN(auto plain, Read(*engine, request));
    start(*engine, std::move(plain));
    return absl::OkStatus();
  }

  // Ends a call whose request Admit or Read has refused with `status`. If the
  // request has a step number and the error does not depend on time or token,
  // the step is accepted (AcceptRefused). `done` gets the call's status.
  template <typename Request>
  CancelHandle Refuse(const Request& request, const absl::Status& status,
                      std::function<void(const absl::Status&)> done) {
    if constexpr (NumberedRequest<Request>) {
      if (request.step() > 0 && KeepsNumber(status)) {
        return AcceptRefused({.adapter_id = request.adapter_id(),
                              .step = request.step(),
                              .epoch = request.epoch(),
                              .digest = DigestOf(request),
                              .status = status},
                             std::move(done));
      }
    }
    done(status);
    return {};
  }

  // Has the engine accept a step whose request was refused. The step fails in
  // its turn, so that later steps can run. `done` gets the call's status.
  CancelHandle AcceptRefused(
      RefusedStep refused, std::function<void(const absl::Status&)> done) const;

  // Gives the request the engine's names of adapters, and stores the object of
  // the call for Audit and NoteError: the adapter's id, or ADAPTER/CHECKPOINT.
  // Errors: those of Qualify.
  absl::Status Take(const RequestFields& fields);

  // The request has come, or never will: takes the call off the tenant's calls
  // that have only begun.
  void CountArrived();
  // Count a message that was received or sent.
  void CountReceived() { core_->metrics.Received(rpc_); }
  void CountSent() { core_->metrics.Sent(rpc_); }

  // Charges the caller for memory that the call takes, until Release. Errors:
  // those of FairBudget::Reserve.
  absl::Status Hold(int64_t bytes,
                    FairBudget::Term term = FairBudget::Term::kShort);
  // Charges the caller for a reply, unless Read has charged for the result.
  absl::Status HoldReply(int64_t bytes);
  // Ends the call if its client does not read or send `bytes` in time
  // (StalledCalls). The second method ends this wait.
  void AwaitClient(int64_t bytes = 0) { core_->stalled.Await(context_, bytes); }
  void StopAwaiting() { core_->stalled.Forget(context_); }
  // Ends what the methods above have begun. Each reactor's OnDone calls it,
  // because gRPC holds the reply until then.
  void Release();

  // Counts the reply in the metrics as the stored reply of an earlier call. For
  // gRPC, also marks the reply with a trailer.
  void MarkReplayed();

  // Counts and logs the outcome, and frees the call's place in the tenant's
  // quota. Returns the status with the caller's names of adapters.
  absl::Status FinishCall(const absl::Status& status);
  // Like FinishCall, for a gRPC call: adds trailers and returns the gRPC
  // status.
  [[nodiscard]] grpc::Status Close(const absl::Status& status);

  // Returns the trace id of the call's log lines. Hold a TraceScope of this id
  // while you pass the request to the engine.
  const TraceId& trace() const { return origin_.trace; }
  ServiceCore* core() const { return core_; }
  grpc::CallbackServerContext* context() const { return context_; }

 private:
  CallRecord(ServiceCore* core, grpc::CallbackServerContext* context,
             CallOrigin origin, Rpc rpc);
  // Sets the charge of a validated request of a step or a sample. Errors: those
  // of Reserve.
  template <typename Plain>
  absl::Status Charge(const engine::Engine& engine, Plain* plain) const {
    int64_t bytes = origin_.charge == nullptr ? NumBytes(*plain) : 0;
    uint64_t ahead = 0;
    if constexpr (requires { plain->step; }) {
      ahead = engine.Ahead(plain->adapter_id, plain->step);
    }
    if constexpr (requires { plain->unnumbered; }) {
      bytes += engine.ReplayBytes(*plain);
      if (plain->unnumbered) ahead = 0;
    }
    return Reserve(bytes, call_bytes_, ahead, &plain->charge);
  }
  // Charges the caller for `bytes` of a request that waits for `ahead` others,
  // besides what the front has charged, and sets `charge`. Errors: those of
  // CheckLeavesCalls and FairBudget::ReserveRequest.
  absl::Status Reserve(int64_t bytes, int64_t beside, uint64_t ahead,
                       std::shared_ptr<void>* charge) const;
  // Returns RESOURCE_EXHAUSTED if calls that wait for a step that has not come
  // would leave no call for it.
  absl::Status CheckLeavesCalls(uint64_t ahead) const;
  // Charges the caller for the result of a request.
  absl::Status HoldResult(const RequestFields& fields, const EngineInfo& info);
  // Charges the tokens of a request to the tenant. Refund gives them back, for
  // a call that the engine refused or answered without computing anything.
  absl::Status Spend(int64_t tokens);
  void Refund();
  // Returns whether the call has a valid token. The quota counts only calls
  // with a valid token.
  bool has_tenant() const {
    return caller().ok() && !caller()->tenant().empty();
  }
  void CountRefusal(const absl::Status& status);
  // Adds the failure to ServiceCore::errors, unless it is no failure.
  void NoteError(const absl::Status& status);
  // Logs the calls that an operator may want to look up later: deletions,
  // drains, and an admin's calls of methods that need scope train or admin.
  void Audit(const absl::Status& status) const;

  ServiceCore* const core_;
  grpc::CallbackServerContext* const context_;
  const Rpc rpc_;
  const absl::Time start_;
  const CallOrigin origin_;
  absl::Status entered_;
  std::vector<std::shared_ptr<void>> held_;  // What Hold has reserved.
  std::string object_;
  int64_t call_bytes_ = 0;    // What the call and Parse have charged.
  int64_t result_bytes_ = 0;  // What Read has charged for the result.
  int64_t spent_ = 0;         // The tokens that this call was charged.
  bool arrived_ = false;      // Parse has had a message.
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_CALL_H_
