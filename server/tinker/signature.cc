#include "server/tinker/signature.h"

#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <array>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"

namespace weft::tinker {

absl::StatusOr<std::string> Sign(const std::string& text) {
  using Secret = std::array<unsigned char, 32>;
  static const std::pair<Secret, int> secret = [] {
    std::pair<Secret, int> made;
    made.second = RAND_bytes(made.first.data(), made.first.size());
    return made;
  }();
  if (secret.second != 1) {
    return absl::InternalError("no randomness for signatures");
  }
  unsigned char digest[32];
  unsigned size = sizeof(digest);
  HMAC(EVP_sha256(), secret.first.data(), secret.first.size(),
       reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest,
       &size);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest), size));
}

}  // namespace weft::tinker
