// Identifies a base model.
#ifndef WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_
#define WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "src/config/options.h"

namespace weft::engine {

// Returns a SHA-256 in hexadecimal. It covers config.json, and the size and
// some bytes of each .bin and .safetensors file in the model's folder. It does
// not depend on the folder's name and place. Errors: NOT_FOUND (config.json
// cannot be opened).
[[nodiscard]] absl::StatusOr<std::string> ModelFingerprint(
    const EngineOptions& options);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_
