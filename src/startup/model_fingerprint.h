// Identifies a base model.
#ifndef WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_
#define WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "src/config/options.h"

namespace weft::engine {

// Returns one line: the SHA-256, in hexadecimal, of config.json and of the size
// and some bytes of every file of weights. The line does not depend on the name
// and place of the folder. Errors: NOT_FOUND (no config.json).
[[nodiscard]] absl::StatusOr<std::string> ModelFingerprint(
    const EngineOptions& options);

}  // namespace weft::engine

#endif  // WEFT_SRC_STARTUP_MODEL_FINGERPRINT_H_
