#include "src/engine/compute_guard.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/engine/torch_guard.h"

namespace weft::engine {
namespace {

// Bounds how long an idle server takes to detect the loss of a rank that
// another process started. The server detects the end of its own child
// processes without pings (LocalRanks::Check).
constexpr absl::Duration kPingInterval = absl::Seconds(1);

}  // namespace

absl::Status ComputeGuard::Guarded(const char* what,
                                   const std::function<void()>& body) {
  const absl::Status status = RunGuarded(what, body);
  // If other ranks have failed, the device may wait for them forever, so it is
  // not queried.
  if (status.ok() || executor_.failed()) return status;
  if (absl::IsResourceExhausted(status)) device_.ReleaseCached();
  const absl::Status answers = device_.CheckAnswers();
  if (answers.ok()) return status;
  return Fail(what, answers, "the server has lost its device");
}

absl::Status ComputeGuard::Compute(const char* what,
                                   const std::function<void()>& body) {
  if (absl::Status failed = failure(); !failed.ok()) return failed;
  const absl::Status status = Guarded(what, body);
  if (!executor_.failed()) return status;
  const absl::Status failed =
      Fail(what, status, "the ranks of the server have lost each other");
  // Keeps RESOURCE_EXHAUSTED, so that the client does not send the request to
  // another server. The request needs too much memory there, too.
  return absl::IsResourceExhausted(status) ? status : failed;
}

void ComputeGuard::PingWhenDue() {
  if (executor_.alone() || !failure().ok() ||
      SteadyNow() - last_ping_ < kPingInterval) {
    return;
  }
  Compute("Ping", [this] { executor_.Ping(); }).IgnoreError();
  last_ping_ = SteadyNow();
}

absl::Status ComputeGuard::failure() const {
  MutexLock lock(&mu_);
  return failure_;
}

absl::Status ComputeGuard::Fail(const char* what, const absl::Status& reason,
                                std::string_view message) {
  Log(LogLevel::kError, message,
      {{"work", what}, {"error", std::string(reason.message())}});
  MutexLock lock(&mu_);
  failure_ = absl::UnavailableError(absl::StrCat(
      std::string(message),
      "; it restarts, and what was not acknowledged has not been done"));
  return failure_;
}

}  // namespace weft::engine
