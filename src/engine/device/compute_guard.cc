#include "src/engine/device/compute_guard.h"

#include <c10/util/Exception.h>

#include <exception>
#include <new>
#include <string>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"

namespace weft::engine {
namespace {

// Bounds how long an idle server takes to detect the loss of a rank that
// another process started. The server detects the end of its own child
// processes without pings (LocalRanks::Check).
constexpr absl::Duration kPingInterval = absl::Seconds(1);

// The value of cudaErrorMemoryAllocation. A CPU build lacks the CUDA header
// that defines the name.
constexpr int kCudaOutOfMemory = 2;

absl::Status Internal(const char* what, const c10::Error& error) {
  Log(LogLevel::kError, "LibTorch error",
      {{"work", what}, {"error", error.what()}});
  return absl::InternalError(
      absl::StrCat(what, ": ", error.what_without_backtrace()));
}

absl::Status OutOfMemory(const std::string& message) {
  return WithReason(absl::ResourceExhaustedError(message),
                    {.name = "OUT_OF_MEMORY", .values = {}});
}

absl::Status OutOfDeviceMemory(const char* what) {
  Log(LogLevel::kError, "out of device memory", {{"work", what}});
  return OutOfMemory(absl::StrCat(what, ": out of device memory"));
}

}  // namespace

absl::Status RunGuarded(const char* what, const std::function<void()>& body) {
  try {
    body();
    return absl::OkStatus();
  } catch (const c10::OutOfMemoryError&) {
    return OutOfDeviceMemory(what);
  } catch (const c10::AcceleratorError& error) {
    // CUDA itself may also run out of memory, because pinned memory and CUDA's
    // libraries do not use LibTorch's allocator of device memory.
    return error.get_error_code() == kCudaOutOfMemory ? OutOfDeviceMemory(what)
                                                      : Internal(what, error);
  } catch (const std::bad_alloc&) {
    Log(LogLevel::kError, "out of memory", {{"work", what}});
    return OutOfMemory(absl::StrCat(what, ": out of memory"));
  } catch (const c10::NotImplementedError& error) {
    Log(LogLevel::kError, "not implemented",
        {{"work", what}, {"error", error.what_without_backtrace()}});
    return absl::UnimplementedError(
        absl::StrCat(what, ": ", error.what_without_backtrace()));
  } catch (const c10::Error& error) {
    return Internal(what, error);
  } catch (const std::exception& error) {
    Log(LogLevel::kError, "exception",
        {{"work", what}, {"error", error.what()}});
    return absl::InternalError(absl::StrCat(what, ": ", error.what()));
  }
}

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
