// Decides when a call is repeated, and converts gRPC's statuses to absl's.
#ifndef WEFT_CLIENT_RETRY_H_
#define WEFT_CLIENT_RETRY_H_

#include <optional>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// Repeats failed calls. If the server sends a hint when to come again,
// repetitions go on until the call's deadline. Otherwise they use bounded
// exponential back-off with jitter. The default delays add up to about 16
// seconds, which outlasts a short restart of the daemon.
struct RetryPolicy {
  int max_attempts = 8;  // Limit of consecutive calls without a hint; 1: never
                         // repeat.
  absl::Duration initial_delay = absl::Milliseconds(200);
  absl::Duration max_delay = absl::Seconds(5);
  double jitter = 0.2;  // Delays vary by this fraction, up and down.
};

// The result of a failed attempt.
struct Failure {
  absl::Status status;
  std::optional<absl::Duration> retry_after;  // The server's hint, if any.
  bool repeatable = true;  // False: the server asks not to repeat the call.
};

// Returns how long to wait after a call failed, or nullopt to give up.
// `attempt` counts the consecutive calls that failed without a hint, including
// this one. Repeats only UNAVAILABLE, and RESOURCE_EXHAUSTED with a hint, but
// neither if the server asks not to. Never waits beyond `remaining`. `draw` in
// [0, 1) sets the jitter.
[[nodiscard]] std::optional<absl::Duration> NextDelay(const RetryPolicy& policy,
                                                      int attempt,
                                                      const Failure& failure,
                                                      absl::Duration remaining,
                                                      double draw);

// Returns a random number in [0, 1) for NextDelay. Threads: any.
[[nodiscard]] double DrawJitter();

// Converts a status. Codes map one to one.
[[nodiscard]] absl::Status FromGrpcStatus(const grpc::Status& status);

// Returns the status of a finished call, with the hint of its trailer
// `grpc-retry-pushback-ms`. By gRPC's rule (proposal A6) a negative number, or
// a text that is no number, asks not to repeat the call.
[[nodiscard]] Failure ReadFailure(const grpc::Status& status,
                                  const grpc::ClientContext& context);

}  // namespace weft::client

#endif  // WEFT_CLIENT_RETRY_H_
