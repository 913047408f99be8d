#include "client/retry.h"

#include <algorithm>
#include <random>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "client/step_counter.h"
#include "src/base/clock.h"
#include "weft/v1/errors.pb.h"

namespace weft::client {

std::optional<absl::Duration> NextDelay(const RetryPolicy& policy, int attempt,
                                        const Failure& failure,
                                        absl::Duration remaining, double draw) {
  const bool repeatable =
      absl::IsUnavailable(failure.status) || failure.reason == kMoved ||
      (absl::IsResourceExhausted(failure.status) && failure.retry_after);
  if (!repeatable || !failure.repeatable || policy.max_attempts == 1) {
    return std::nullopt;
  }
  absl::Duration delay;
  if (failure.retry_after) {
    // The jitter spreads the retries of many refused clients. After a hint it
    // only adds time, so that no client retries earlier than the server asked.
    delay = std::max(*failure.retry_after, policy.initial_delay);
    delay *= 1 + policy.jitter * draw;
  } else {
    if (!failure.answered && attempt >= kFirstAttempts) return std::nullopt;
    if (policy.max_attempts && attempt >= *policy.max_attempts) {
      return std::nullopt;
    }
    // Limits the shift below, so that it cannot overflow. 2^20 initial delays
    // exceed any max_delay in use.
    const int doublings = std::min(attempt - 1, 20);
    delay = std::min(policy.initial_delay * (1 << doublings), policy.max_delay);
    delay *= 1 + policy.jitter * (2 * draw - 1);
  }
  if (delay >= remaining) return std::nullopt;
  return delay;
}

double DrawJitter() {
  thread_local std::minstd_rand generator{std::random_device{}()};
  return std::uniform_real_distribution<double>(0, 1)(generator);
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      status.error_message());
}

gpr_timespec ToGrpcTime(absl::Time when) {
  const int64_t left = absl::ToInt64Nanoseconds(when - SteadyNow());
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(left, GPR_TIMESPAN));
}

namespace {

// Returns the status's reason (weft/v1/errors.proto); empty if none.
v1::ErrorInfo ReasonOf(const grpc::Status& status) {
  v1::StatusDetails details;
  v1::ErrorInfo info;
  if (!details.ParseFromString(status.error_details()) ||
      details.details_size() != 1 ||
      !info.ParseFromString(details.details(0).value())) {
    return {};
  }
  return info;
}

// Returns whether gRPC has not sent the call, because there is no connection.
bool IsUnsent(const grpc::Status& status) {
  for (const char* const text :
       {"failed to connect to all addresses", "DNS resolution failed"}) {
    if (absl::StartsWith(status.error_message(), text)) return true;
  }
  return false;
}

}  // namespace

Failure ReadFailure(const grpc::Status& status,
                    const grpc::ClientContext& context) {
  Failure failure{.status = FromGrpcStatus(status), .retry_after = {}};
  const auto& trailers = context.GetServerTrailingMetadata();
  if (trailers.count("weft-step-done") > 0) {
    failure.status.SetPayload(kStepDonePayload, {});
  }
  failure.from_server = trailers.count("weft-trace-id") > 0;
  failure.unsent = !failure.from_server && IsUnsent(status);
  const v1::ErrorInfo info = ReasonOf(status);
  failure.reason = info.reason();
  if (failure.reason == kMoved) {
    const auto owner = info.metadata().find("address");
    if (owner != info.metadata().end()) failure.owner = owner->second;
    failure.only_adapter = info.metadata().contains("adapter");
  }
  if (failure.reason == "STALE_EPOCH") {
    failure.status.SetPayload(kStaleEpochPayload, {});
  }
  const auto hint = trailers.find("grpc-retry-pushback-ms");
  int milliseconds = 0;
  if (hint == trailers.end()) return failure;
  failure.repeatable = absl::SimpleAtoi(absl::string_view(hint->second.data(),
                                                          hint->second.size()),
                                        &milliseconds) &&
                       milliseconds >= 0;
  if (failure.repeatable) {
    failure.retry_after = absl::Milliseconds(milliseconds);
  }
  return failure;
}

}  // namespace weft::client
