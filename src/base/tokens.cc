#include "src/base/tokens.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>

#include <array>
#include <cstdlib>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace weft {
namespace {

constexpr size_t kTokenBytes = 32;
constexpr std::array<std::pair<Scope, const char*>, 4> kScopes = {
    {{Scope::kRead, "read"},
     {Scope::kSample, "sample"},
     {Scope::kTrain, "train"},
     {Scope::kAdmin, "admin"}}};

// Ends the process if OpenSSL failed, because a token without randomness or
// SHA-256 would be weak.
void Require(bool done) {
  if (!done) std::abort();
}

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

bool TokenRecord::Allows(Scope scope) const {
  return scopes.contains(Scope::kAdmin) || scopes.contains(scope) ||
         (scope == Scope::kRead && !scopes.empty());
}

std::string NewToken() {
  std::array<unsigned char, kTokenBytes> bytes{};
  Require(RAND_bytes(bytes.data(), static_cast<int>(bytes.size())) == 1);
  return absl::StrCat(
      "weft_", absl::WebSafeBase64Escape(absl::string_view(
                   reinterpret_cast<const char*>(bytes.data()), bytes.size())));
}

std::string HashToken(absl::string_view token) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned size = 0;
  Require(EVP_Digest(token.data(), token.size(), digest.data(), &size,
                     EVP_sha256(), nullptr) == 1);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), size));
}

const TokenRecord* FindToken(const std::vector<TokenRecord>& records,
                             absl::string_view token) {
  const std::string hash = HashToken(token);
  const TokenRecord* found = nullptr;
  for (const TokenRecord& record : records) {
    const bool same =
        record.sha256.size() == hash.size() &&
        CRYPTO_memcmp(record.sha256.data(), hash.data(), hash.size()) == 0;
    if (same) found = &record;
  }
  return found;
}

}  // namespace weft
