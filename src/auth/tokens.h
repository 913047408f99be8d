// Bearer tokens: their records in a server, and how it recognizes a token.
//
// A token is "weft_" and 32 random bytes. The server stores only its SHA-256,
// from which nobody can compute the token. A slow hash, as for passwords, gains
// nothing, because nobody can guess 256 random bits.
// Threads: any.
#ifndef WEFT_SRC_AUTH_TOKENS_H_
#define WEFT_SRC_AUTH_TOKENS_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace weft {

// What a token permits. Every scope includes kRead, and kAdmin includes all
// scopes.
enum class Scope : uint8_t { kRead, kSample, kTrain, kAdmin };

// Returns "read", "sample", "train" or "admin".
[[nodiscard]] const char* ScopeName(Scope scope);
// Errors: INVALID_ARGUMENT for any other name.
[[nodiscard]] absl::StatusOr<Scope> ParseScope(absl::string_view name);

struct TokenRecord {
  std::string id;      // For people and logs; not secret.
  std::string sha256;  // SHA-256 of the token, in 64 lower-case hex digits.
  std::string tenant;
  std::set<Scope> scopes;
  absl::Time expires = absl::InfiniteFuture();

  [[nodiscard]] bool Allows(Scope scope) const;
};

// Joins a tenant and an id into one name. Neither a tenant nor an id contains
// it.
inline constexpr char kTenantSeparator = '~';
// Bounded because a folder's name holds the tenant, the separator and the
// adapter's id.
inline constexpr size_t kMaxTenantLength = 64;

// Returns a random token.
[[nodiscard]] std::string NewToken();
// Returns the token's TokenRecord::sha256.
[[nodiscard]] std::string HashToken(absl::string_view token);

// Returns the record of `token`, which may have expired, or null if there is
// none. The time does not depend on how much the token resembles a record.
[[nodiscard]] const TokenRecord* FindToken(
    const std::vector<TokenRecord>& records, absl::string_view token);

}  // namespace weft

#endif  // WEFT_SRC_AUTH_TOKENS_H_
