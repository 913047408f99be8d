// The only place that converts an absl::Status to a gRPC status.
#ifndef WEFT_SERVER_WIRE_STATUS_CONVERSION_H_
#define WEFT_SERVER_WIRE_STATUS_CONVERSION_H_

#include <optional>

#include "absl/status/status.h"
#include "grpcpp/grpcpp.h"

namespace weft::server {

// The longest message of a status. Statuses travel as HTTP/2 metadata, which
// clients limit to 8 KiB in total.
inline constexpr size_t kMaxStatusMessageBytes = 1024;

// How many milliseconds a refused caller should wait if the error's Reason has
// no "retry_ms".
inline constexpr int kRetryPushbackMillis = 1000;

// Converts a status. Codes map one to one. A message longer than
// kMaxStatusMessageBytes is cut, but not inside a UTF-8 character. A Reason
// becomes the details of the gRPC status (weft/v1/errors.proto).
[[nodiscard]] grpc::Status ToGrpcStatus(const absl::Status& status);

// Returns after how many milliseconds the same call may succeed. Returns
// nullopt if waiting does not help. Waiting helps after UNAVAILABLE, and after
// RESOURCE_EXHAUSTED for a reason that passes by itself. It does not help if
// the error is the result of a step (kStepDonePayload).
std::optional<int> RetryMillis(const absl::Status& status);

// Returns whether a step that was refused with this error keeps its number and
// has the error as its result. Such an error comes from the request alone, so
// the same call would always fail.
bool KeepsNumber(const absl::Status& status);

// Adds the trailer `grpc-retry-pushback-ms` if RetryMillis returns a number.
void AddRetryHint(const absl::Status& status, grpc::ServerContextBase* context);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_STATUS_CONVERSION_H_
