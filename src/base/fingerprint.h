// Fingerprints of base models (src/engine/adapters/model_fingerprint.h) that
// differ.
#ifndef WEFT_SRC_BASE_FINGERPRINT_H_
#define WEFT_SRC_BASE_FINGERPRINT_H_

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

// A fingerprint begins with a SHA-256 in hexadecimal. Then come the parts that
// it covers, each as a space and `name=value`. Names ascend.
inline constexpr size_t kFingerprintDigits = 64;

// Names the parts in which two fingerprints differ, for an error message, such
// as "hidden is 64, here 128; layer 3 differs". If `stored` has no parts, says
// that it comes from an older server. `stored` need not be trusted.
std::string FingerprintDifference(std::string_view stored,
                                  std::string_view own);

}  // namespace weft

#endif  // WEFT_SRC_BASE_FINGERPRINT_H_
