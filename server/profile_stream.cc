#include "server/profile_stream.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "server/field_checks.h"
#include "server/request_validation.h"
#include "src/base/status_macros.h"
#include "weft/v1/server.pb.h"

namespace weft {
namespace {

constexpr size_t kTracePieceBytes = 1 << 20;

class ProfileCall final : public RequestReactor<v1::ProfileRequest> {
 public:
  using RequestReactor::RequestReactor;

 private:
  void Run(const v1::ProfileRequest& request) override {
    const absl::Status refused = record().Begin(
        request, [this](Engine& engine, const ProfileRequest& plain) {
          SetCancel(engine.Profile(
              plain, [this, call = self()](absl::StatusOr<std::string> trace) {
                if (!trace.ok()) return End(trace.status());
                trace_ = *std::move(trace);
                const absl::Status held =
                    record().Hold(static_cast<int64_t>(trace_.size()));
                held.ok() ? SendNext() : End(held);
              }));
        });
    if (!refused.ok()) End(refused);
  }

  void SendNext() {
    if (sent_ == trace_.size()) return End(absl::OkStatus());
    const size_t count = std::min(kTracePieceBytes, trace_.size() - sent_);
    v1::ProfileResponse message;
    message.set_trace(trace_.data() + sent_, count);
    sent_ += count;
    Write(message);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) return End(absl::CancelledError("the client went away"));
    SendNext();
  }

  std::string trace_;
  size_t sent_ = 0;
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

void AddProfile(RawService* service) {
  service->Add<ProfileCall>(Rpc::kProfile);
}

}  // namespace weft
