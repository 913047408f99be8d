#include "server/call.h"

#include <chrono>
#include <string>

#include "absl/time/clock.h"
#include "server/status_conversion.h"
#include "src/base/log.h"

namespace weft {

CallRecord::CallRecord(ServiceCore* core, grpc::CallbackServerContext* context,
                       Rpc rpc)
    : core_(core), context_(context), rpc_(rpc), start_(absl::Now()) {
  core_->open_calls.fetch_add(1);
  core_->metrics.Started(rpc);
}

absl::Time CallRecord::deadline() const {
  const auto deadline = context_->deadline();
  if (deadline == std::chrono::system_clock::time_point::max()) {
    return absl::InfiniteFuture();
  }
  return absl::FromChrono(deadline);
}

absl::StatusOr<Engine*> CallRecord::Admit() const {
  if (deadline() <= absl::Now()) {
    return absl::DeadlineExceededError("the deadline passed before arrival");
  }
  return core_->engine.Get();
}

void CallRecord::MarkReplayed() {
  context_->AddTrailingMetadata("weft-replayed", "1");
  core_->metrics.Replayed(rpc_);
}

void CallRecord::CountRefusal(const absl::Status& status) {
  RejectReason reason = ReasonOf(status);
  if (reason == RejectReason::kDraining && core_->engine.Peek() == nullptr) {
    reason = RejectReason::kStarting;
  }
  core_->metrics.Rejected(reason);
}

grpc::Status CallRecord::Close(const absl::Status& status) {
  const absl::Duration elapsed = absl::Now() - start_;
  core_->metrics.Handled(rpc_, status, elapsed);
  if (!status.ok()) {
    CountRefusal(status);
    AddRetryHint(status, context_);
    if (status.GetPayload(kStepDonePayload)) {
      context_->AddTrailingMetadata("weft-step-done", "1");
    }
    if (status.GetPayload(kReplayedPayload)) MarkReplayed();
  }
  // A failure that is nobody's request is the operator's business.
  const bool is_fault = absl::IsInternal(status) || absl::IsUnknown(status) ||
                        absl::IsDataLoss(status);
  Log(is_fault ? LogLevel::kError : LogLevel::kDebug, "rpc",
      {{"rpc", RpcName(rpc_)},
       {"code", absl::StatusCodeToString(status.code())},
       {"ms", absl::ToDoubleMilliseconds(elapsed)},
       {"peer", context_->peer()},
       {"error", std::string(status.message())}});
  return ToGrpcStatus(status);
}

void CancelSlot::Set(CancelHandle handle) {
  {
    MutexLock lock(&mu_);
    if (cleared_) return;
    if (!cancelled_) {
      handle_ = std::move(handle);
      return;
    }
  }
  handle.Cancel();
}

void CancelSlot::Cancel() {
  CancelHandle handle;
  {
    MutexLock lock(&mu_);
    cancelled_ = true;
    handle = std::exchange(handle_, CancelHandle());
  }
  handle.Cancel();
}

void CancelSlot::Clear() {
  CancelHandle handle;  // Destroyed outside the lock.
  MutexLock lock(&mu_);
  cleared_ = true;
  handle = std::exchange(handle_, CancelHandle());
}

}  // namespace weft
