// The owner of an entry of the ledger: enough of a caller to act for it after a
// restart, and no token.
#ifndef WEFT_SERVER_TINKER_OWNER_H_
#define WEFT_SERVER_TINKER_OWNER_H_

#include <string>

#include "server/caller.h"
#include "server/tinker/fields.h"

namespace weft::tinker {

// Equal for callers who share sessions: those of one tenant. An admin, whose
// names are the engine's, shares none with its tenant.
[[nodiscard]] std::string OwnerKey(const Caller& caller);

[[nodiscard]] Json CallerToJson(const Caller& caller);
[[nodiscard]] Caller CallerFromJson(const Json& json);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_OWNER_H_
