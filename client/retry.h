// Decides when a call is repeated, and converts gRPC's statuses and times.
#ifndef WEFT_CLIENT_RETRY_H_
#define WEFT_CLIENT_RETRY_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"

namespace weft::client {

// A client that has never had an answer makes so many attempts, within about
// 3 seconds.
inline constexpr int kFirstAttempts = 5;

// How a failed call is repeated: until the call's deadline, so that a program
// outlives a restart of the server's machine. If the server says when to retry
// (a hint), the client does so. Otherwise the delay doubles with each attempt,
// up to max_delay, with jitter.
struct RetryPolicy {
  // The most attempts in a row that fail without a hint. None: no limit. 1:
  // never repeat.
  std::optional<int> max_attempts = std::nullopt;
  absl::Duration initial_delay = absl::Milliseconds(200);
  absl::Duration max_delay = absl::Seconds(5);
  // Delays vary by up to this fraction. After a hint, they only get longer.
  double jitter = 0.2;
};

// Reasons of errors (weft/v1/errors.proto) of a server that is not the owner.
inline constexpr char kMoved[] = "MOVED";
inline constexpr char kStandby[] = "STANDBY";

// The outcome of an attempt that failed.
struct Failure {
  absl::Status status;
  std::optional<absl::Duration> retry_after;  // The server's hint, if any.
  bool repeatable = true;   // False: the server asks clients not to retry.
  bool answered = true;     // The client has had an answer before.
  bool from_server = true;  // The server sent it, not the connection.
  bool unsent = false;      // The call has not left: there is no connection.
  std::string reason = {};  // weft/v1/errors.proto; empty: none.
  std::string owner = {};   // The address with the reason kMoved.
  // With the reason kMoved: the server has other adapters than the call's.
  bool only_adapter = false;
};

// Returns how long to wait after an attempt failed, or nullopt to give up. A
// call is repeated after UNAVAILABLE, MOVED, or RESOURCE_EXHAUSTED with a hint,
// unless the server forbids a retry. All other errors are final. `attempt`
// counts the attempts in a row that failed without a hint, including the latest
// attempt. `remaining` is the time until the deadline. NextDelay gives up if
// the delay would be at least `remaining`. `draw` in [0, 1) sets the jitter.
std::optional<absl::Duration> NextDelay(const RetryPolicy& policy, int attempt,
                                        const Failure& failure,
                                        absl::Duration remaining, double draw);

// Returns a random number in [0, 1) for NextDelay. Threads: any.
double DrawJitter();

// Converts a status. Codes map one to one.
absl::Status FromGrpcStatus(const grpc::Status& status);

// Converts a time of SteadyNow to gRPC's monotonic clock.
gpr_timespec ToGrpcTime(absl::Time when);

// Returns the outcome of a failed attempt, with the hint of the trailer
// `grpc-retry-pushback-ms`. By gRPC's rule (proposal A6), a value that is
// negative or not a number forbids a retry.
Failure ReadFailure(const grpc::Status& status,
                    const grpc::ClientContext& context);

}  // namespace weft::client

#endif  // WEFT_CLIENT_RETRY_H_
