#include "src/base/sha256.h"

#include <cstdlib>

namespace weft {
namespace {

// The calls of OpenSSL fail only if it has no SHA-256 or no memory.
void Require(bool success) {
  if (!success) std::abort();
}

}  // namespace

Sha256Sum::Sha256Sum() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
  Require(context_ != nullptr &&
          EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
}

void Sha256Sum::Add(std::string_view bytes) {
  Require(EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()) == 1);
}

std::string Sha256Sum::Finish() {
  std::string digest(32, '\0');
  Require(EVP_DigestFinal_ex(context_.get(),
                             reinterpret_cast<unsigned char*>(digest.data()),
                             nullptr) == 1);
  return digest;
}

std::string Sha256(std::string_view bytes) {
  Sha256Sum sum;
  sum.Add(bytes);
  return sum.Finish();
}

}  // namespace weft
