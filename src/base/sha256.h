#ifndef WEFT_SRC_BASE_SHA256_H_
#define WEFT_SRC_BASE_SHA256_H_

#include <string>
#include <string_view>

namespace weft {

// Returns the SHA-256 of `bytes`, 32 bytes.
[[nodiscard]] std::string Sha256(std::string_view bytes);

}  // namespace weft

#endif  // WEFT_SRC_BASE_SHA256_H_
