// The owner of an entry of the front, in memory and in the ledger. The ledger
// keeps what the front needs to act for the caller after a restart: the token's
// id, the tenant and the scope, but no secret.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_OWNER_H_
#define WEFT_SERVER_TINKER_OWNER_H_

#include <string>

#include "server/caller.h"
#include "server/tinker/fields.h"

namespace weft::tinker {

// Returns a key that is equal for all callers of a tenant, who share sessions.
// A tenant's admins have a key of their own, because they use the engine's
// names for adapters.
[[nodiscard]] std::string OwnerKey(const Caller& caller);

// Returns what the ledger keeps of a caller.
[[nodiscard]] Json CallerToJson(const Caller& caller);
// Returns the caller that CallerToJson has converted; Caller() if `json` has no
// tenant.
[[nodiscard]] Caller CallerFromJson(const Json& json);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_OWNER_H_
