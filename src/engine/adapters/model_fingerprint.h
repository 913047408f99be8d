// Identifies a base model.
#ifndef WEFT_SRC_ENGINE_ADAPTERS_MODEL_FINGERPRINT_H_
#define WEFT_SRC_ENGINE_ADAPTERS_MODEL_FINGERPRINT_H_

#include <string>

#include "absl/status/statusor.h"
#include "src/base/options/options.h"

namespace weft::engine {

// Returns a SHA-256 in hexadecimal and the parts that it covers
// (src/base/fingerprint.h). They cover what the decoder reads: the numbers of
// config.json with which it computes, and of each tensor name, dtype, shape and
// a sample. So the fingerprint does not depend on the spelling of config.json,
// on end-of-sequence tokens, on the context length, on how tensors are divided
// into files, or on other files. It also does not depend on the folder's name.
// A change that leaves all sampled blocks of a tensor as they are is not seen.
// Errors: those of ReadModelConfig and weights::Checkpoint.
absl::StatusOr<std::string> ModelFingerprint(const EngineOptions& options);

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ADAPTERS_MODEL_FINGERPRINT_H_
