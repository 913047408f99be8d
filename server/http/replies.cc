#include "server/http/replies.h"

#include <string>

namespace weft::server {

HttpReply JsonReply(const nlohmann::json& body, int status) {
  // The library would throw an exception for bytes that are not UTF-8.
  return {.status = status,
          .body = body.dump(-1, ' ', false,
                            nlohmann::json::error_handler_t::replace)};
}

int HttpStatusOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return 200;
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
      return 400;
    case absl::StatusCode::kUnauthenticated:
      return 401;
    case absl::StatusCode::kPermissionDenied:
      return 403;
    case absl::StatusCode::kNotFound:
      return 404;
    // The usual HTTP statuses for these two codes are 409 and 501. But the SDK
    // repeats a request after 409 and 501, so both codes become 400.
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kUnimplemented:
      return 400;
    case absl::StatusCode::kAborted:
      return 410;
    case absl::StatusCode::kResourceExhausted:
      return 429;
    case absl::StatusCode::kUnavailable:
      return 503;
    case absl::StatusCode::kDeadlineExceeded:
      return 504;
    default:
      return 500;
  }
}

HttpReply ErrorReply(const absl::Status& status) {
  HttpReply reply = JsonReply({{"detail", std::string(status.message())}},
                              HttpStatusOf(status));
  if (reply.status == 429 || reply.status == 503) reply.retry_after_seconds = 1;
  return reply;
}

}  // namespace weft::server
