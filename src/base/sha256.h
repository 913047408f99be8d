#ifndef WEFT_SRC_BASE_SHA256_H_
#define WEFT_SRC_BASE_SHA256_H_

#include <openssl/evp.h>

#include <memory>
#include <string>
#include <string_view>

namespace weft {

// Returns the SHA-256 of `bytes`, 32 bytes.
std::string Sha256(std::string_view bytes);

// Computes the SHA-256 of bytes that come in pieces.
// Threads: not thread-safe.
class Sha256Sum {
 public:
  Sha256Sum();
  void Add(std::string_view bytes);
  // Returns the SHA-256 of all bytes, 32 bytes. Call it once, at the end.
  std::string Finish();

 private:
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_SHA256_H_
