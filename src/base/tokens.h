// Bearer tokens, and the records in which a server describes its tokens.
//
// A token is "weft_" and 32 random bytes in base64. The server stores only the
// token's SHA-256, from which nobody can compute the token. A slow hash, as for
// passwords, gains nothing, because nobody can guess 256 random bits.
// Threads: any.
#ifndef WEFT_SRC_BASE_TOKENS_H_
#define WEFT_SRC_BASE_TOKENS_H_

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
const char* ScopeName(Scope scope);
// Returns the scope of this name. Errors: INVALID_ARGUMENT for any other name.
absl::StatusOr<Scope> ParseScope(absl::string_view name);

struct TokenEntry {
  std::string id;      // For people and logs; not secret.
  std::string sha256;  // SHA-256 of the token, in 64 lower-case hex digits.
  std::string tenant;
  std::set<Scope> scopes;
  absl::Time expires = absl::InfiniteFuture();

  bool Allows(Scope scope) const;
};

// Stands between the tenant and the id in an adapter's name, as in "tenant~id".
// No name (IsName) contains this character.
inline constexpr char kTenantSeparator = '~';

// Returns whether `adapter_id` names no single adapter, but all whose names
// begin with it: all of a tenant, or, if it is empty, all.
inline bool NamesAll(absl::string_view adapter_id) {
  return adapter_id.empty() || adapter_id.back() == kTenantSeparator;
}
// Returns who takes turns for work of this adapter: its tenant. On a server
// without tokens each adapter takes turns.
inline std::string OwnerOf(const std::string& adapter_id) {
  return adapter_id.substr(0, adapter_id.find(kTenantSeparator));
}
// In bytes. The name of an adapter's folder holds the tenant, the separator and
// the id, so the tenant must be short.
inline constexpr size_t kMaxTenantLength = 64;

// Returns a random token.
std::string NewToken();
// Returns the token's TokenEntry::sha256.
std::string HashToken(absl::string_view token);

// Returns the record of the token with this HashToken, even if it has expired,
// or null if there is none. The search time does not reveal how similar the
// hash is to a known one.
const TokenEntry* FindTokenOfHash(const std::vector<TokenEntry>& records,
                                  absl::string_view hash);

}  // namespace weft

#endif  // WEFT_SRC_BASE_TOKENS_H_
