#include "server/tinker/credentials.h"

#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "server/tinker/handlers.h"
#include "server/tinker/wire/fields.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"
#include "src/base/threads/mutex.h"

namespace weft::server::tinker {
namespace {

// Returns a number for a token's id. The SDK's type has numbers, and Weft's ids
// are names.
int64_t KeyNumber(const std::string& token_id) {
  int64_t number = 0;
  for (const char byte : Sha256(token_id).substr(0, 6)) {
    number = number << 8 | static_cast<unsigned char>(byte);
  }
  return number;
}

// Returns the signature of a header and claims, both in base64.
absl::StatusOr<std::string> SignJwt(absl::string_view signed_part) {
  return Sign(absl::StrCat("jwt ", signed_part));
}

absl::Status BadJwt() {
  return absl::UnauthenticatedError(
      "the JWT is not of this server, or has expired: exchange the API key "
      "again");
}

}  // namespace

std::string UserOf(const Caller& caller) {
  return caller.token_id().empty() ? "anyone" : caller.token_id();
}

std::string OrganizationOf(const Caller& caller) {
  return caller.tenant().empty() ? "weft" : caller.tenant();
}

absl::StatusOr<std::string> MakeJwt(const Caller& caller,
                                    const std::string& token_hash,
                                    absl::Time now) {
  const int64_t seconds = absl::ToUnixSeconds(now);
  const Json claims = {{"iss", "weft"},
                       {"sub", absl::StrCat("weft:token:", UserOf(caller))},
                       {"org_id", OrganizationOf(caller)},
                       {"email", ""},
                       {"iat", seconds},
                       {"exp", seconds + absl::ToInt64Seconds(kJwtLifetime)},
                       {"token", token_hash}};
  const std::string signed_part =
      absl::StrCat(absl::WebSafeBase64Escape(R"({"alg":"HS256","typ":"JWT"})"),
                   ".", absl::WebSafeBase64Escape(claims.dump()));
  WEFT_ASSIGN_OR_RETURN(const std::string signature, SignJwt(signed_part));
  return absl::StrCat(signed_part, ".", signature);
}

absl::StatusOr<std::string> ReadJwt(absl::string_view jwt, absl::Time now) {
  const std::vector<absl::string_view> parts = absl::StrSplit(jwt, '.');
  if (parts.size() != 3) return BadJwt();
  WEFT_ASSIGN_OR_RETURN(
      const std::string signature,
      SignJwt(jwt.substr(0, jwt.size() - parts[2].size() - 1)));
  std::string text;
  if (!IsSignature(parts[2], signature) ||
      !absl::WebSafeBase64Unescape(parts[1], &text)) {
    return BadJwt();
  }
  const Json claims = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!claims.is_object() ||
      claims.value("exp", int64_t{0}) <= absl::ToUnixSeconds(now)) {
    return BadJwt();
  }
  return claims.value("token", "");
}

absl::StatusOr<Json> GetAuthToken(Front& /*front*/, const Call& call) {
  // A JWT is good for no other JWT, so it cannot outlive its hour.
  if (!call.jwt.empty()) return Json{{"jwt", call.jwt}};
  WEFT_ASSIGN_OR_RETURN(const std::string jwt,
                        MakeJwt(call.caller, call.token_hash, absl::Now()));
  return Json{{"jwt", jwt}};
}

absl::StatusOr<Json> GetApiKey(Front& /*front*/, const Call& call) {
  const std::string user = UserOf(call.caller);
  return Json{{"key_id", KeyNumber(user)},
              {"name", user},
              {"note", ""},
              {"details",
               {{"org_details", {{"name", OrganizationOf(call.caller)}}},
                {"user_details", {{"email", ""}}}}}};
}

absl::StatusOr<std::string> NewId() {
  unsigned char bytes[16];
  if (RAND_bytes(bytes, sizeof(bytes)) != 1) {
    return absl::InternalError("no randomness for an id");
  }
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(bytes), sizeof(bytes)));
}

bool IsSignature(absl::string_view given, const std::string& signature) {
  return given.size() == signature.size() &&
         CRYPTO_memcmp(given.data(), signature.data(), given.size()) == 0;
}

namespace {

constexpr size_t kSecretBytes = 32;

struct Secret {
  Mutex mu;
  std::string bytes ABSL_GUARDED_BY(mu);  // Empty: none is drawn yet.
};

Secret& TheSecret() {
  static Secret* const secret = new Secret();  // Lives as long as the threads.
  return *secret;
}

}  // namespace

absl::StatusOr<std::string> SigningSecret() {
  Secret& secret = TheSecret();
  MutexLock lock(&secret.mu);
  if (secret.bytes.empty()) {
    std::string bytes(kSecretBytes, '\0');
    if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()),
                   kSecretBytes) != 1) {
      return absl::InternalError("no randomness for signatures");
    }
    secret.bytes = std::move(bytes);
  }
  return secret.bytes;
}

bool TakeSigningSecret(const std::string& secret) {
  if (secret.size() != kSecretBytes) return false;
  MutexLock lock(&TheSecret().mu);
  TheSecret().bytes = secret;
  return true;
}

absl::StatusOr<std::string> Sign(const std::string& text) {
  WEFT_ASSIGN_OR_RETURN(const std::string secret, SigningSecret());
  unsigned char digest[32];
  unsigned size = sizeof(digest);
  HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest,
       &size);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), size));
}

}  // namespace weft::server::tinker
