#include "server/profile_stream.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/call.h"
#include "server/cancel_slot.h"
#include "server/field_checks.h"
#include "server/request_validation.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

constexpr size_t kTracePieceBytes = 1 << 20;

// Ownership: shared by gRPC (until OnDone) and the engine's callback.
class ProfileCall final : public grpc::ServerWriteReactor<grpc::ByteBuffer> {
 public:
  ProfileCall(ServiceCore* core, grpc::CallbackServerContext* context)
      : record_(core, context, Rpc::kProfile) {}

  static ProfileCall* Start(ServiceCore* core,
                            grpc::CallbackServerContext* context,
                            const grpc::ByteBuffer* bytes) {
    const auto call = std::make_shared<ProfileCall>(core, context);
    call->self_ = call;
    call->record_.CountReceived();
    v1::ProfileRequest request;
    const auto charge = call->record_.Parse(bytes, &request);
    if (!charge.ok()) {
      call->End(charge.status());
      return call.get();
    }
    const absl::Status refused = call->record_.Begin(
        request, [&call](Engine& engine, const ProfileRequest& plain) {
          call->cancel_.Set(engine.Profile(
              plain, [call = call](absl::StatusOr<std::string> trace) {
                if (!trace.ok()) return call->End(trace.status());
                call->trace_ = *std::move(trace);
                const absl::Status held = call->record_.Hold(
                    static_cast<int64_t>(call->trace_.size()));
                if (!held.ok()) return call->End(held);
                call->SendNext();
              }));
        });
    if (!refused.ok()) call->End(refused);
    return call.get();
  }

 private:
  void SendNext() {
    if (sent_ == trace_.size()) return End(absl::OkStatus());
    const size_t count = std::min(kTracePieceBytes, trace_.size() - sent_);
    v1::ProfileResponse message;
    message.set_trace(trace_.data() + sent_, count);
    bytes_ = ToBytes(message);
    sent_ += count;
    record_.CountSent();
    record_.AwaitClient();
    StartWrite(&bytes_);
  }

  void End(const absl::Status& status) {
    record_.AwaitClient();
    Finish(record_.Close(status));
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(absl::CancelledError("the client went away"));
    SendNext();
  }
  void OnCancel() override { cancel_.Cancel(); }
  void OnDone() override {
    cancel_.Clear();
    record_.Release();
    const std::shared_ptr<ProfileCall> self = std::move(self_);
  }

  CallRecord record_;
  CancelSlot cancel_;
  std::string trace_;
  size_t sent_ = 0;
  grpc::ByteBuffer bytes_;  // Belongs to gRPC during a write.
  std::shared_ptr<ProfileCall> self_;
};

}  // namespace

absl::StatusOr<ProfileRequest> Validate(const v1::ProfileRequest& request,
                                        const RequestLimits& /*limits*/) {
  WEFT_RETURN_IF_ERROR(
      CheckCount("steps", request.steps(), 0, kMaxProfileSteps));
  WEFT_RETURN_IF_ERROR(CheckReal("seconds", request.seconds(),
                                 {.low = 0, .high = kMaxProfileSeconds}));
  ProfileRequest plain{.steps = request.steps()};
  if (request.seconds() > 0) {
    // A tiny positive time must not round to 0.
    plain.duration = std::max(absl::Seconds(request.seconds()),
                              absl::Duration(absl::Nanoseconds(1)));
  }
  return plain;
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* StartProfile(
    ServiceCore* core, grpc::CallbackServerContext* context,
    const grpc::ByteBuffer* request) {
  return ProfileCall::Start(core, context, request);
}

}  // namespace weft
