// Digests of request payloads. They tell a repeated call from a different call
// with the same step number.
#ifndef WEFT_SRC_REQUEST_DIGEST_H_
#define WEFT_SRC_REQUEST_DIGEST_H_

#include <string>

#include "src/request/adapter.h"
#include "src/request/checkpoint.h"
#include "src/request/train.h"

namespace weft {

// Returns the SHA-256 (32 bytes) of the request's type and of the fields that
// decide what a numbered step does. Step, epoch and deadline are not among
// them. Floats are hashed by their bits. Takes time linear in the bytes.
[[nodiscard]] std::string PayloadDigest(const TrainRequest& request);
[[nodiscard]] std::string PayloadDigest(const OptimStepRequest& request);
[[nodiscard]] std::string PayloadDigest(const SaveCheckpointRequest& request);
[[nodiscard]] std::string PayloadDigest(const LoadCheckpointRequest& request);
[[nodiscard]] std::string PayloadDigest(const PublishSnapshotRequest& request);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_DIGEST_H_
