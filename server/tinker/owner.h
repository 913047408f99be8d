// Converts callers to JSON for the ledger. The JSON has the token's id, the
// tenant, and whether the caller is an admin, so that the front can act for the
// caller after a restart. The JSON has no secret.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_OWNER_H_
#define WEFT_SERVER_TINKER_OWNER_H_

#include <string>

#include "server/caller.h"
#include "server/tinker/fields.h"

namespace weft::tinker {

// Returns the JSON that the ledger keeps of a caller.
[[nodiscard]] Json CallerToJson(const Caller& caller);
// Converts the JSON of CallerToJson to a caller. Returns Caller() if the JSON
// has no tenant.
[[nodiscard]] Caller CallerFromJson(const Json& json);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_OWNER_H_
