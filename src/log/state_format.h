// Encodes and decodes what a folder and an object store keep alike: FORMAT and
// snapshots.
#ifndef WEFT_SRC_LOG_STATE_FORMAT_H_
#define WEFT_SRC_LOG_STATE_FORMAT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/log/state.h"

namespace weft::log {

// Returns the text of FORMAT for a base model.
std::string EncodeFormat(const std::string& model);
// Returns the base model that FORMAT names. Errors: DATA_LOSS,
// FAILED_PRECONDITION (another version).
absl::StatusOr<std::string> DecodeFormat(const std::string& text);
// Says that the state is that of another base model.
absl::Status OtherModel(const std::string& stored, const std::string& model);

// Returns what precedes the bytes of a snapshot.
std::string SnapshotHeader(uint64_t next_sequence, std::string_view bytes);
// Takes a header and the bytes after it. Errors: DATA_LOSS, which calls it
// `name`.
absl::StatusOr<SnapshotFile> DecodeSnapshotFile(uint64_t next_sequence,
                                                std::string file,
                                                const std::string& name);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_STATE_FORMAT_H_
