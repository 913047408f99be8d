// Bearer tokens: what a server knows of them, and how it recognizes one.
//
// A token is "weft_" and 32 random bytes. The server keeps its SHA-256 alone:
// whoever reads that cannot make the token of it. A slow hash, as for
// passwords, gains nothing, for nobody guesses 256 random bits.
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

// What a token's bearer may do. Every scope includes kRead, kAdmin all.
enum class Scope : uint8_t { kRead, kSample, kTrain, kAdmin };

// "read", "sample", "train", "admin".
[[nodiscard]] const char* ScopeName(Scope scope);
// INVALID_ARGUMENT for another name.
[[nodiscard]] absl::StatusOr<Scope> ParseScope(absl::string_view name);

struct TokenRecord {
  std::string id;      // For people and logs; no secret.
  std::string sha256;  // The token's, in 64 lower-case hex digits.
  std::string tenant;
  std::set<Scope> scopes;
  absl::Time expires = absl::InfiniteFuture();

  [[nodiscard]] bool Allows(Scope scope) const;
};

// What separates a tenant from an id where both are one name. It occurs in
// neither.
inline constexpr char kTenantSeparator = '~';
// A folder bears the tenant's name, the separator and the adapter's.
inline constexpr size_t kMaxTenantLength = 64;

// Draws a token.
[[nodiscard]] std::string NewToken();
// The hex digits that TokenRecord::sha256 has.
[[nodiscard]] std::string HashToken(absl::string_view token);

// The record of `token`, expired or not; null: none. Takes as long for one
// token as for another, whether they resemble a record or not.
[[nodiscard]] const TokenRecord* FindToken(
    const std::vector<TokenRecord>& records, absl::string_view token);

}  // namespace weft

#endif  // WEFT_SRC_AUTH_TOKENS_H_
