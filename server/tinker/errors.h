// Converts a status to an HTTP reply, or to the result of a failed future.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_ERRORS_H_
#define WEFT_SERVER_TINKER_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "server/http/message.h"
#include "server/tinker/fields.h"

namespace weft::tinker {

// Returns the status with the Tinker API's names for the fields of weft.v1. Its
// payloads are the same.
[[nodiscard]] absl::Status InClientsNames(const absl::Status& status);

// Returns the HTTP status: 200, 400, 401, 403, 404, 410 (ABORTED: the thing
// that the client asks for is gone), 429, 503, 504 or 500.
[[nodiscard]] int HttpStatusOf(const absl::Status& status);

// Returns a reply with the body {"detail": message} and the HTTP status of
// HttpStatusOf. The replies 429 and 503 also have the header Retry-After.
[[nodiscard]] HttpReply ErrorReply(const absl::Status& status);

// Returns "user" if the request must change to succeed, else "server".
[[nodiscard]] const char* CategoryOf(const absl::Status& status);

// Returns {"error": message, "category": CategoryOf}, the result of a future
// that failed.
[[nodiscard]] Json FailureOf(const absl::Status& status);

[[nodiscard]] HttpReply JsonReply(const Json& body, int status = 200);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ERRORS_H_
