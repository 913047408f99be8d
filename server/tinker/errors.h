// Converts a status to the names and results of the Tinker API.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_ERRORS_H_
#define WEFT_SERVER_TINKER_ERRORS_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/tinker/wire/fields.h"
#include "src/request/field_names.h"

namespace weft::server::tinker {

// Returns the Tinker API's names for the fields of weft.v1.
absl::Span<const FieldName> ClientsNames();

// Returns {"error": message, "category": ...}, the result of a future that
// failed. The category is "user" if the request must change to succeed, else
// "server".
Json FailureOf(const absl::Status& status);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_ERRORS_H_
