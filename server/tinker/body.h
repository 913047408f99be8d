// Bodies of requests: decompressed and parsed, within limits.
// Errors: INVALID_ARGUMENT; RESOURCE_EXHAUSTED for what would become too large.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_BODY_H_
#define WEFT_SERVER_TINKER_BODY_H_

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::tinker {

// JSON takes up to 16 times its text in memory. Larger data comes as protobuf.
inline constexpr size_t kMaxJsonBytes = size_t{16} << 20;
inline constexpr int kMaxJsonDepth = 64;

// Undoes Content-Encoding "" or "zstd" in place. However small the body, no
// more than `max_bytes` are made of it.
[[nodiscard]] absl::Status Decode(absl::string_view encoding, size_t max_bytes,
                                  std::string* body);

// The JSON object that `text` is; an empty text is an empty object.
[[nodiscard]] absl::StatusOr<nlohmann::json> ParseObject(
    absl::string_view text);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_BODY_H_
