#include "src/base/sha256.h"

#include <openssl/evp.h>

#include <cstdlib>

namespace weft {

std::string Sha256(std::string_view bytes) {
  std::string digest(32, '\0');
  auto* const out = reinterpret_cast<unsigned char*>(digest.data());
  // Fails only if OpenSSL has no SHA-256 or no memory.
  if (EVP_Digest(bytes.data(), bytes.size(), out, nullptr, EVP_sha256(),
                 nullptr) != 1) {
    std::abort();
  }
  return digest;
}

}  // namespace weft
