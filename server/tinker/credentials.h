// Says who a caller is. Makes ids and signatures.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_CREDENTIALS_H_
#define WEFT_SERVER_TINKER_CREDENTIALS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/call/caller.h"

namespace weft::server::tinker {

// Returns the names by which the SDK's whoami calls the caller and its tenant.
std::string UserOf(const Caller& caller);
std::string OrganizationOf(const Caller& caller);

// Returns 128 random bits in hex. Ids name adapters, folders and futures, so
// none may repeat. Errors: INTERNAL if the system has no random bits.
absl::StatusOr<std::string> NewId();

// Returns the HMAC-SHA256 of `text` in hex, with a secret. It signs download
// URLs, JWTs and the ids of samples' futures, so that nobody can guess one.
// Errors: INTERNAL if the system has no random bits for the secret.
absl::StatusOr<std::string> Sign(const std::string& text);

// The secret, which a process draws at first. With a state, the first process
// keeps it, and later ones and those with its other logs take it, so that what
// one has signed is good for all.
absl::StatusOr<std::string> SigningSecret();
// Returns false if `secret` is none.
bool TakeSigningSecret(const std::string& secret);

// Compares a signature with the one that a client gave, in constant time.
bool IsSignature(absl::string_view given, const std::string& signature);

// The SDK exchanges an API key for a short-lived token (JWT), which it then
// sends in its place. A JWT names the access token by its hash, so it permits
// what the access token permits, and no longer than that.
//
// Every JWT begins with this, and no API key does.
inline constexpr char kJwtPrefix[] = "eyJ";
inline constexpr absl::Duration kJwtLifetime = absl::Hours(1);

// Returns a JWT of the caller whose access token has this hash (HashToken;
// empty on a server without tokens). Errors: those of Sign.
absl::StatusOr<std::string> MakeJwt(const Caller& caller,
                                    const std::string& token_hash,
                                    absl::Time now);
// Returns MakeJwt's `token_hash`. Errors: UNAUTHENTICATED if this process has
// not made the JWT, or if it has expired.
absl::StatusOr<std::string> ReadJwt(absl::string_view jwt, absl::Time now);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_CREDENTIALS_H_
