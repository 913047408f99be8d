// grpc.health.v1.Health. gRPC's own implementation would take messages of any
// size without charging anybody.
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "google/protobuf/wrappers.pb.h"
#include "server/call/health.h"
#include "server/grpc/raw_service.h"
#include "server/grpc/services.h"
#include "src/base/threads/mutex.h"

namespace weft::server {
namespace {

// These have the fields of HealthCheckRequest and HealthCheckResponse.
using Request = google::protobuf::StringValue;
using Response = google::protobuf::Int32Value;

Response ResponseOf(Health health) {
  Response response;
  response.set_value(static_cast<int>(health));
  return response;
}

class CheckCall final : public RequestReactor<Request> {
 public:
  using RequestReactor::RequestReactor;

 private:
  void Run(const Request& request) override {
    const Health health = record().core()->health.Of(request.value());
    if (health != Health::kUnknown) return Send(ResponseOf(health));
    End(absl::NotFoundError("there is no such service"));
  }
};

// Sends what is known of a service, and again when it has changed.
class WatchCall final : public RequestReactor<Request> {
 public:
  using RequestReactor::RequestReactor;

 private:
  void Run(const Request& request) override {
    {
      MutexLock lock(&mu_);
      busy_ = false;
    }
    record().core()->health.Watch(
        this, request.value(),
        [this, call = self()](std::optional<Health> health) {
          health ? Show(*health)
                 : EndWith(absl::UnavailableError("the server ends"));
        });
  }

  void Show(Health health) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      latest_ = health;
    }
    Pump();
  }

  void EndWith(const absl::Status& outcome) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      MutexLock lock(&mu_);
      outcome_.Update(outcome);
    }
    Pump();
  }

  // Sends what is new, or ends the call.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::Status outcome;
    Health next = Health::kUnknown;
    {
      MutexLock lock(&mu_);
      if (busy_ || (outcome_.ok() && latest_ == sent_)) return;
      busy_ = true;  // Stays true after the status, which is the last write.
      sent_ = latest_;
      if (sent_) next = *sent_;
      outcome = outcome_;
    }
    outcome.ok() ? Write(ResponseOf(next)) : End(outcome);
  }

  void OnWriteDone(bool ok) override {
    record().StopAwaiting();
    {
      MutexLock lock(&mu_);
      busy_ = false;
    }
    ok ? Pump() : EndWith(absl::CancelledError("the client went away"));
  }

  void OnCancel() override {
    RequestReactor::OnCancel();
    EndWith(absl::CancelledError("the client went away"));
  }

  void OnDone() override {
    record().core()->health.Forget(this);
    RequestReactor::OnDone();
  }

  Mutex mu_;
  // The call reads its request, writes, or has ended.
  bool busy_ ABSL_GUARDED_BY(mu_) = true;
  std::optional<Health> latest_ ABSL_GUARDED_BY(mu_);
  std::optional<Health> sent_ ABSL_GUARDED_BY(mu_);
  absl::Status outcome_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::unique_ptr<RawService> MakeHealthService(ServiceCore* core) {
  auto service = std::make_unique<RawService>(core);
  service->Add<CheckCall>(Rpc::kHealthCheck);
  service->Add<WatchCall>(Rpc::kHealthWatch);
  return service;
}

}  // namespace weft::server
