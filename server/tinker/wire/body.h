// Decompresses and parses the bodies of requests, within limits.
// Errors: INVALID_ARGUMENT for a bad body; RESOURCE_EXHAUSTED for a body that
// is too large.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_WIRE_BODY_H_
#define WEFT_SERVER_TINKER_WIRE_BODY_H_

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft::server::tinker {

// The largest JSON body after decompression. Parsed JSON takes many times the
// memory of its text. Clients send larger data as protobuf.
inline constexpr size_t kMaxJsonBytes = size_t{16} << 20;
inline constexpr int kMaxJsonDepth = 64;

// Decompresses `*body` in place. `encoding` is the value of Content-Encoding:
// "zstd", or "" or "identity", which leave the body as it is.
// Errors: INVALID_ARGUMENT for another encoding, or if the body is not one zstd
// frame; RESOURCE_EXHAUSTED if the decompressed body has more than `max_bytes`.
absl::Status Decode(absl::string_view encoding, size_t max_bytes,
                    std::string* body);

// Returns at most how many bytes of memory the JSON text takes when it is
// parsed: many times its own.
int64_t ParsedJsonBytes(absl::string_view text);

// Parses a JSON object. An empty text gives an empty object. Errors:
// INVALID_ARGUMENT if the text is no object, or is nested deeper than
// kMaxJsonDepth; RESOURCE_EXHAUSTED above kMaxJsonBytes.
absl::StatusOr<nlohmann::json> ParseObject(absl::string_view text);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_WIRE_BODY_H_
