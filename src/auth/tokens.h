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

// What a token permits. Every scope includes kRead; kAdmin includes all.
enum class Scope : uint8_t { kRead, kSample, kTrain, kAdmin };

// "read", "sample", "train", "admin".
[[nodiscard]] const char* ScopeName(Scope scope);
// Errors: INVALID_ARGUMENT for any other name.
[[nodiscard]] absl::StatusOr<Scope> ParseScope(absl::string_view name);

struct TokenRecord {
  std::string id;      // For people and logs; not secret.
  std::string sha256;  // The token's, in 64 lower-case hex digits.
  std::string tenant;
  std::set<Scope> scopes;
  absl::Time expires = absl::InfiniteFuture();

  [[nodiscard]] bool Allows(Scope scope) const;
};

// Separates a tenant from an id in one name. It occurs in neither.
inline constexpr char kTenantSeparator = '~';
// A folder's name holds the tenant, the separator and the adapter's id.
inline constexpr size_t kMaxTenantLength = 64;

// Returns a random token.
[[nodiscard]] std::string NewToken();
// Returns TokenRecord::sha256 of a token.
[[nodiscard]] std::string HashToken(absl::string_view token);

// Returns the record of `token`, expired or not; null: none. It takes the same
// time for each token, whether it resembles a record or not.
[[nodiscard]] const TokenRecord* FindToken(
    const std::vector<TokenRecord>& records, absl::string_view token);

}  // namespace weft

#endif  // WEFT_SRC_AUTH_TOKENS_H_
