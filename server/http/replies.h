// Makes replies from JSON and from a status.
// Threads: any.
#ifndef WEFT_SERVER_HTTP_REPLIES_H_
#define WEFT_SERVER_HTTP_REPLIES_H_

#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "server/http/message.h"

namespace weft::server {

HttpReply JsonReply(const nlohmann::json& body, int status = 200);

// Returns the HTTP status: 200, 400, 401, 403, 404, 410 (ABORTED: the thing
// that the client asks for is gone), 429, 503, 504 or 500.
int HttpStatusOf(const absl::Status& status);

// Returns a reply with the body {"detail": message} and the HTTP status of
// HttpStatusOf. The replies 429 and 503 also have the header Retry-After.
HttpReply ErrorReply(const absl::Status& status);

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_REPLIES_H_
