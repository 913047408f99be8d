#include "server/tinker/errors.h"

namespace weft::tinker {
namespace {

// Prints JSON. Replaces bytes that are not UTF-8, because the library would
// throw an exception for such bytes.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

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

HttpReply JsonReply(const Json& body, int status) {
  return {.status = status, .body = Dump(body)};
}

HttpReply ErrorReply(const absl::Status& status) {
  HttpReply reply = JsonReply({{"detail", std::string(status.message())}},
                              HttpStatusOf(status));
  if (reply.status == 429 || reply.status == 503) reply.retry_after_seconds = 1;
  return reply;
}

const char* CategoryOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kUnimplemented:
      return "user";
    default:
      return "server";
  }
}

Json FailureOf(const absl::Status& status) {
  return {{"error", std::string(status.message())},
          {"category", CategoryOf(status)}};
}

}  // namespace weft::tinker
