#include "server/tinker/jwt.h"

#include <openssl/crypto.h>

#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "server/tinker/fields.h"
#include "server/tinker/signature.h"
#include "src/base/status_macros.h"

namespace weft::tinker {
namespace {

// Returns the signature of a header and claims, both in base64.
absl::StatusOr<std::string> SignJwt(absl::string_view signed_part) {
  return Sign(absl::StrCat("jwt ", signed_part));
}

absl::Status BadJwt() {
  return absl::UnauthenticatedError(
      "the JWT is not of this process, or has expired: exchange the API key "
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
  if (parts[2].size() != signature.size() ||
      CRYPTO_memcmp(parts[2].data(), signature.data(), signature.size()) != 0) {
    return BadJwt();
  }
  std::string text;
  if (!absl::WebSafeBase64Unescape(parts[1], &text)) return BadJwt();
  const Json claims = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!claims.is_object() ||
      claims.value("exp", int64_t{0}) <= absl::ToUnixSeconds(now)) {
    return BadJwt();
  }
  return claims.value("token", "");
}

}  // namespace weft::tinker
