// The short-lived tokens (JWT) for which the SDK exchanges an API key, and
// which it then sends in its place. A JWT names the access token by its hash,
// so it permits what the access token permits, and no longer than that.
// Signatures are of this process: after a restart the SDK exchanges its key
// again.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_JWT_H_
#define WEFT_SERVER_TINKER_JWT_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/caller.h"

namespace weft::tinker {

// Every JWT begins with this, and no API key does.
inline constexpr char kJwtPrefix[] = "eyJ";
inline constexpr absl::Duration kJwtLifetime = absl::Hours(1);

// The names by which the SDK's whoami calls the caller and its tenant.
[[nodiscard]] std::string UserOf(const Caller& caller);
[[nodiscard]] std::string OrganizationOf(const Caller& caller);

// Returns a JWT of the caller whose access token has this hash (HashToken;
// empty on a server without tokens). Errors: those of Sign.
[[nodiscard]] absl::StatusOr<std::string> MakeJwt(const Caller& caller,
                                                  const std::string& token_hash,
                                                  absl::Time now);
// Returns MakeJwt's `token_hash`. Errors: UNAUTHENTICATED if this process has
// not made the JWT, or if it has expired.
[[nodiscard]] absl::StatusOr<std::string> ReadJwt(absl::string_view jwt,
                                                  absl::Time now);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_JWT_H_
