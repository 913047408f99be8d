// Digests of request payloads. By them a repeated call is told from a different
// call under the same step number.
#ifndef WEFT_SRC_REQUEST_DIGEST_H_
#define WEFT_SRC_REQUEST_DIGEST_H_

#include <string>
#include <string_view>

#include "src/request/adapter.h"
#include "src/request/train.h"

namespace weft {

// SHA-256 of `bytes`, 32 bytes.
[[nodiscard]] std::string Sha256(std::string_view bytes);

// SHA-256 (32 bytes) over the request's type and all that its effect depends
// on, which is everything but step and deadline. Floats are compared by their
// bits. Machines of one byte order give equal digests for equal payloads. Takes
// time linear in the bytes.
[[nodiscard]] std::string PayloadDigest(const TrainRequest& request);
[[nodiscard]] std::string PayloadDigest(const OptimStepRequest& request);
[[nodiscard]] std::string PayloadDigest(const SaveCheckpointRequest& request);
[[nodiscard]] std::string PayloadDigest(const LoadCheckpointRequest& request);
[[nodiscard]] std::string PayloadDigest(const PublishSnapshotRequest& request);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_DIGEST_H_
