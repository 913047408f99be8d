// What a status is to an HTTP client, and to one that asks for a future.
#ifndef WEFT_SERVER_TINKER_ERRORS_H_
#define WEFT_SERVER_TINKER_ERRORS_H_

#include <string>

#include "absl/status/status.h"
#include "server/tinker/fields.h"
#include "server/tinker/http_message.h"

namespace weft::tinker {

// 400, 401, 403, 404, 410 (ABORTED: what was promised is gone), 429, 503, 504,
// or 500.
[[nodiscard]] int HttpStatusOf(const absl::Status& status);

// {"detail": message} with HttpStatusOf.
[[nodiscard]] HttpReply ErrorReply(const absl::Status& status);

// Whether the caller can mend it ("user"), or the operator must ("server").
[[nodiscard]] const char* CategoryOf(const absl::Status& status);

// {"error": message, "category": ...}: the result of a future that failed.
[[nodiscard]] Json FailureOf(const absl::Status& status);

[[nodiscard]] HttpReply JsonReply(const Json& body, int status = 200);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ERRORS_H_
