#include "src/base/tokens.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>

#include <array>
#include <cstdlib>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "src/base/sha256.h"

namespace weft {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr std::array<std::pair<Scope, const char*>, 4> kScopes = {
    {{Scope::kRead, "read"},
     {Scope::kSample, "sample"},
     {Scope::kTrain, "train"},
     {Scope::kAdmin, "admin"}}};

}  // namespace

const char* ScopeName(Scope scope) {
  return kScopes[static_cast<size_t>(scope)].second;
}

absl::StatusOr<Scope> ParseScope(absl::string_view name) {
  for (const auto& [scope, known] : kScopes) {
    if (name == known) return scope;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", absl::CHexEscape(name.substr(0, 32)),
                   "' is not a scope: read, sample, train or admin"));
}

bool TokenEntry::Allows(Scope scope) const {
  return scopes.contains(Scope::kAdmin) || scopes.contains(scope) ||
         (scope == Scope::kRead && !scopes.empty());
}

std::string NewToken() {
  std::array<unsigned char, kTokenBytes> bytes{};
  // A token without randomness would be weak.
  if (RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) != 1)
    std::abort();
  return absl::StrCat(
      "weft_", absl::WebSafeBase64Escape(absl::string_view(
                   reinterpret_cast<const char*>(bytes.data()), bytes.size())));
}

std::string HashToken(absl::string_view token) {
  return absl::BytesToHexString(Sha256({token.data(), token.size()}));
}

const TokenEntry* FindTokenOfHash(const std::vector<TokenEntry>& records,
                                  absl::string_view hash) {
  const TokenEntry* found = nullptr;
  for (const TokenEntry& record : records) {
    const bool same =
        record.sha256.size() == hash.size() &&
        CRYPTO_memcmp(record.sha256.data(), hash.data(), hash.size()) == 0;
    if (same) found = &record;
  }
  return found;
}

}  // namespace weft
