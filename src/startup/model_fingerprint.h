// Tells one base model from another.
#ifndef WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_
#define WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "src/config/options.h"

namespace weft::engine {

// One line: SHA-256, in hexadecimal, of config.json and of the sizes and some
// bytes of every file of weights. A model with other contents has another one;
// the folder's name and place do not matter. NOT_FOUND: no config.json.
[[nodiscard]] absl::StatusOr<std::string> ModelFingerprint(
    const EngineOptions& options);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_
