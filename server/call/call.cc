#include "server/call/call.h"

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/proto_buffer_reader.h"
#include "server/call/rpc_policy.h"
#include "server/http/host.h"
#include "server/wire/parse_cost.h"
#include "server/wire/status_conversion.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace weft::server {
namespace {

// What gRPC and the handler of a call take besides its messages.
constexpr int64_t kCallBytes = 32 << 10;
// What the client of a gRPC call may have sent before the call reads it.
constexpr int64_t kWindowBytes = 64 << 10;
// What the number of an expert takes in a result and in the reply made of it.
constexpr int64_t kExpertBytes = 4;

// Returns the value of the first header of this name; empty if there is none.
std::string Header(const grpc::CallbackServerContext& context,
                   const char* name) {
  const auto [begin, end] = context.client_metadata().equal_range(name);
  if (begin == end) return {};
  return std::string(begin->second.data(), begin->second.size());
}

// Returns whether the engine refused the call before it computed anything. The
// same call may succeed later.
bool RanNothing(const absl::Status& status) {
  switch (ReasonOf(status)) {
    case RejectReason::kOrder:
    case RejectReason::kAdapterRoom:
    case RejectReason::kDiskFull:
    case RejectReason::kStoreUnreachable:
    case RejectReason::kStarting:
    case RejectReason::kDraining:
      return true;
    default:
      return false;
  }
}

absl::StatusOr<Caller> CallerOf(const ServiceCore& core,
                                const grpc::CallbackServerContext& context,
                                Rpc rpc) {
  if (core.authenticator == nullptr) return Caller();
  // Processor has already refused a call with two authorization headers.
  return core.authenticator->Check(RpcPath(rpc),
                                   Header(context, "authorization"));
}

// Returns whether gRPC's `peer` is on this machine.
bool IsLocal(absl::string_view peer) {
  return absl::StartsWith(peer, "ipv4:127.") ||
         absl::StartsWith(peer, "unix:") ||
         absl::StartsWith(peer, "ipv6:%5B::1%5D");
}

CallOrigin OriginOf(const ServiceCore& core,
                    const grpc::CallbackServerContext& context, Rpc rpc) {
  CallOrigin origin{
      .caller = CallerOf(core, context, rpc),
      .peer = ClientAddress(context.peer(), IsLocal(context.peer()),
                            Header(context, "x-real-ip")),
      .trace = MakeTraceId(Header(context, "traceparent"),
                           Header(context, "x-request-id"))};
  const auto deadline = context.deadline();
  if (deadline != std::chrono::system_clock::time_point::max()) {
    // gRPC keeps the time that is left, and shows it by the wall clock.
    origin.deadline =
        SteadyNow() +
        absl::FromChrono(deadline - std::chrono::system_clock::now());
  }
  return origin;
}

}  // namespace

CallRecord::CallRecord(ServiceCore* core, grpc::CallbackServerContext* context,
                       CallOrigin origin, Rpc rpc)
    : core_(core),
      context_(context),
      rpc_(rpc),
      start_(SteadyNow()),
      origin_(std::move(origin)) {
  core_->open_calls.fetch_add(1);
  core_->metrics.Started(rpc);
  entered_ = caller().status();
  if (origin_.counted) return;
  if (has_tenant()) entered_ = core_->quota.Enter(caller()->tenant());
  if (entered_.ok()) {
    call_bytes_ = kCallBytes + (context_ == nullptr ? 0 : kWindowBytes);
    entered_ = Hold(call_bytes_);
  }
}

CallRecord::CallRecord(ServiceCore* core, grpc::CallbackServerContext* context,
                       Rpc rpc)
    : CallRecord(core, context, OriginOf(*core, *context, rpc), rpc) {
  context->AddTrailingMetadata("weft-trace-id", *trace());
}

CallRecord::CallRecord(ServiceCore* core, CallOrigin origin, Rpc rpc)
    : CallRecord(core, nullptr, std::move(origin), rpc) {}

CallRecord::~CallRecord() { core_->open_calls.fetch_sub(1); }

grpc::ByteBuffer ToBytes(const google::protobuf::Message& message) {
  grpc::ByteBuffer bytes;
  bool own = false;
  // Fails only for a message that is not complete, which proto3 does not have.
  (void)grpc::SerializationTraits<google::protobuf::Message>::Serialize(
      message, &bytes, &own);
  return bytes;
}

std::string DigestOf(const google::protobuf::MessageLite& message) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    google::protobuf::io::CodedOutputStream out(&stream);
    out.SetSerializationDeterministic(true);  // Maps have no order otherwise.
    message.SerializeToCodedStream(&out);
  }
  return absl::StrCat("refused ", Sha256(bytes));
}

CancelHandle CallRecord::AcceptRefused(
    RefusedStep refused, std::function<void(const absl::Status&)> done) const {
  const absl::Status status = refused.status;
  const absl::StatusOr<engine::Engine*> engine = core_->engine.Get();
  if (refused.adapter_id.empty() || !engine.ok() ||
      !caller()->Qualify(FieldsOf(&refused)).ok()) {
    done(engine.ok() ? status : engine.status());
    return {};
  }
  refused.deadline = deadline();
  const absl::Status charged = Reserve(
      NumBytes(refused), /*beside=*/0,
      (*engine)->Ahead(refused.adapter_id, refused.step), &refused.charge);
  if (!charged.ok()) {
    done(charged);
    return {};
  }
  // The step has no result but its failure, so any type of result does.
  const Callback<StepReply<AdapterInfo>> end =
      [status, done = std::move(done)](
          const absl::StatusOr<StepReply<AdapterInfo>>& reply) {
        const absl::Status& result = reply.status();
        // If there is no such adapter, or nobody waits any more, the request's
        // own error tells the caller more.
        const bool keeps = result.GetPayload(kStepDonePayload).has_value();
        const bool tells_less = absl::IsNotFound(result) ||
                                absl::IsCancelled(result) ||
                                absl::IsDeadlineExceeded(result);
        done(tells_less && !keeps ? status : result);
      };
  return (*engine)->Submit(std::move(refused), origin_.keep, TypedReply(end));
}

absl::Status CallRecord::Take(const RequestFields& fields) {
  WEFT_RETURN_IF_ERROR(caller()->Qualify(fields));
  if (fields.adapter_id != nullptr) object_ = *fields.adapter_id;
  if (fields.checkpoint != nullptr) {
    absl::StrAppend(&object_, "/", *fields.checkpoint);
  }
  return absl::OkStatus();
}

absl::Status CallRecord::Spend(int64_t tokens) {
  if (!has_tenant() || tokens == 0) return absl::OkStatus();
  const absl::Status status =
      core_->quota.Spend(caller()->tenant(), tokens, SteadyNow());
  if (status.ok()) spent_ = tokens;
  return status;
}

void CallRecord::Refund() {
  if (spent_ > 0) {
    core_->quota.Refund(caller()->tenant(), std::exchange(spent_, 0));
  }
}

RequestLimits CallRecord::limits(const engine::Engine& engine) const {
  RequestLimits limits = MakeLimits(engine.info(), core_->options);
  limits.engine_names = caller()->sees_all();
  return limits;
}

int64_t CallRecord::MostRequestBytes() const {
  return std::min(PolicyOf(rpc_).max_request_bytes,
                  core_->options.max_message_bytes);
}

void CallRecord::CountArrived() {
  if (caller().ok() && !std::exchange(arrived_, true)) {
    core_->quota.Arrive(caller()->tenant());
  }
}

absl::StatusOr<std::shared_ptr<void>> CallRecord::Parse(
    grpc::ByteBuffer* bytes, google::protobuf::Message* request) {
  const absl::Cleanup free = [bytes] { bytes->Clear(); };
  CountArrived();
  const auto size = static_cast<int64_t>(bytes->Length());
  const int64_t most = MostRequestBytes();
  if (size > most) {
    return WithReason(
        absl::ResourceExhaustedError(
            absl::StrCat("the request has ", size, " bytes, must have at most ",
                         most, " for ", RpcName(rpc_))),
        {.name = "TOO_LARGE", .values = {{"limit", absl::StrCat(most)}}});
  }
  grpc::ProtoBufferReader wire(bytes);
  WEFT_ASSIGN_OR_RETURN(const int64_t parsed,
                        ParsedBytes(*request->GetDescriptor(), &wire, size));
  WEFT_ASSIGN_OR_RETURN(
      std::shared_ptr<void> charge,
      core_->memory->Reserve(OwnerKey(*caller()), size + parsed));
  call_bytes_ += size + parsed;
  grpc::ProtoBufferReader again(bytes);
  if (request->ParseFromZeroCopyStream(&again)) return charge;
  return absl::InvalidArgumentError(
      absl::StrCat("the request is not a ", request->GetDescriptor()->name()));
}

absl::StatusOr<engine::Engine*> CallRecord::Admit() const {
  WEFT_RETURN_IF_ERROR(entered_);
  if (deadline() <= SteadyNow()) {
    return absl::DeadlineExceededError("the deadline passed before arrival");
  }
  const bool goes_on = (PolicyOf(rpc_).traits & kGoesOnInADrain) != 0;
  return goes_on ? core_->engine.GetInADrain() : core_->engine.Get();
}

absl::Status CallRecord::Hold(int64_t bytes, FairBudget::Term term) {
  WEFT_ASSIGN_OR_RETURN(
      std::shared_ptr<void> reserved,
      core_->memory->Reserve(OwnerKey(*caller()), bytes, term));
  held_.push_back(std::move(reserved));
  return absl::OkStatus();
}

absl::Status CallRecord::CheckLeavesCalls(uint64_t ahead) const {
  // The front's calls do not wait for their steps.
  if (ahead == 0 || origin_.counted) return absl::OkStatus();
  constexpr uint64_t kMostAhead = kMaxCallsPerConnection / 2;
  if (ahead >= kMostAhead) {
    return WithReason(absl::ResourceExhaustedError(absl::StrCat(
                          "the step is ", ahead,
                          " steps ahead of the next one, must be less "
                          "than ",
                          kMostAhead, ": send the steps below it first")),
                      {.name = "CALLS_UNDER_WAY",
                       .values = {{"limit", absl::StrCat(kMostAhead)}}});
  }
  return has_tenant() ? core_->quota.CheckSpare(caller()->tenant())
                      : absl::OkStatus();
}

absl::Status CallRecord::Reserve(int64_t bytes, int64_t beside, uint64_t ahead,
                                 std::shared_ptr<void>* charge) const {
  WEFT_RETURN_IF_ERROR(CheckLeavesCalls(ahead));
  WEFT_ASSIGN_OR_RETURN(
      *charge,
      core_->memory->ReserveRequest(OwnerKey(*caller()), bytes, beside, ahead));
  // A sample of the front has its own charge.
  if (origin_.charge != nullptr) {
    *charge = std::make_shared<
        std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(origin_.charge,
                                                                 *charge);
  }
  return absl::OkStatus();
}

absl::Status CallRecord::HoldReply(int64_t bytes) {
  return Hold(std::max<int64_t>(bytes - result_bytes_, 0));
}

absl::Status CallRecord::HoldResult(const RequestFields& fields,
                                    const EngineInfo& info) {
  // A front keeps only results that exist.
  const int64_t tokens = origin_.counted ? 0 : fields.token_bytes;
  const int64_t bytes = tokens + fields.list_bytes + fields.edit_bytes +
                        fields.vocab_tables * (info.vocab_size / 8 + 1) +
                        fields.routed_tokens * info.expert_layers *
                            info.experts_per_token * kExpertBytes;
  WEFT_RETURN_IF_ERROR(Hold(bytes, FairBudget::Term::kLong));
  result_bytes_ = bytes;
  return absl::OkStatus();
}

void CallRecord::Release() {
  StopAwaiting();
  held_.clear();
}

void CallRecord::MarkReplayed() {
  if (context_ != nullptr) {
    context_->AddTrailingMetadata("weft-replayed", "1");
  }
  core_->metrics.Replayed(rpc_);
  Refund();
}

void CallRecord::CountRefusal(const absl::Status& status) {
  RejectReason reason = ReasonOf(status);
  if (reason == RejectReason::kDraining && core_->engine.Peek() == nullptr) {
    reason = RejectReason::kStarting;
  }
  core_->metrics.Rejected(reason);
}

void CallRecord::NoteError(const absl::Status& status) {
  // A cancelled call is not a failure of the server. And clients ask for an
  // adapter to learn whether there is one.
  if (absl::IsCancelled(status) ||
      (rpc_ == Rpc::kGetAdapter && absl::IsNotFound(status))) {
    return;
  }
  const std::string rpc = RpcName(rpc_);
  const std::optional<Reason> reason = FindReason(status);
  core_->errors.Add(caller().ok() ? *caller() : Caller(),
                    {.rpc = rpc.substr(rpc.find('/') + 1),
                     .code = status.code(),
                     .reason = reason ? reason->name : "",
                     .adapter_id = object_.substr(0, object_.find('/')),
                     .at = absl::Now()});
}

void CallRecord::Audit(const absl::Status& status) const {
  const RpcPolicy& policy = PolicyOf(rpc_);
  const bool always = (policy.traits & kAudited) != 0;
  const bool admin =
      core_->authenticator != nullptr && caller().ok() && caller()->sees_all();
  if (!always && !(admin && policy.changes_state())) return;
  Log(LogLevel::kInfo, "audit",
      {{"outcome", absl::StatusCodeToString(status.code())},
       {"method", RpcName(rpc_)},
       {"object", object_},
       {"token", caller().ok() ? caller()->token_id() : ""},
       {"tenant", caller().ok() ? caller()->tenant() : ""},
       {"peer", origin_.peer}});
}

absl::Status CallRecord::FinishCall(const absl::Status& status) {
  const TraceScope scope(trace());
  if (RanNothing(status)) Refund();
  // Leaves the quota before the reply is sent, because a client that has the
  // reply may begin its next call at once.
  if (!origin_.counted && has_tenant()) {
    core_->quota.Leave(caller()->tenant());
  }
  const absl::Duration elapsed = SteadyNow() - start_;
  core_->metrics.Handled(rpc_, status, elapsed);
  if (!status.ok()) {
    CountRefusal(status);
    NoteError(status);
    if (status.GetPayload(kReplayedPayload)) MarkReplayed();
  }
  // These codes mean a fault of the server, so the operator must see the line.
  const bool is_fault = absl::IsInternal(status) || absl::IsUnknown(status) ||
                        absl::IsDataLoss(status);
  Log(is_fault ? LogLevel::kError : LogLevel::kDebug, "rpc",
      {{"rpc", RpcName(rpc_)},
       {"code", absl::StatusCodeToString(status.code())},
       {"ms", absl::ToDoubleMilliseconds(elapsed)},
       {"peer", origin_.peer},
       {"error", std::string(status.message())}});
  Audit(status);
  return caller().ok() ? caller()->RevealError(status) : status;
}

grpc::Status CallRecord::Close(const absl::Status& status) {
  if (!status.ok()) {
    AddRetryHint(status, context_);
    if (status.GetPayload(kStepDonePayload)) {
      context_->AddTrailingMetadata("weft-step-done", "1");
    }
  }
  return ToGrpcStatus(FinishCall(status));
}

}  // namespace weft::server
