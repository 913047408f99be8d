// Serves downloads of checkpoints that save_weights_external has saved. Each of
// a checkpoint's two PEFT files has a signed URL.
//
// A signed URL lets anyone read its file without an API key, until the URL
// expires or the server ends. Each server process signs with a new secret.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ARCHIVES_H_
#define WEFT_SERVER_TINKER_ARCHIVES_H_

#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr absl::Duration kUrlLifetime = absl::Hours(1);

// Handles external_weights_urls: responds with the signed URLs of a checkpoint.
// Errors: INVALID_ARGUMENT if the path is malformed or its kind is not
// kExternal; those of FindCheckpoint.
[[nodiscard]] absl::Status GetArchive(Front& front, const CallPtr& call,
                                      const Respond& respond);
// Serves the file of a signed URL, or responds with the error if the file
// cannot be opened. Errors: NOT_FOUND if the URL has expired, or if this
// process has not signed it; UNAVAILABLE if too many reads wait; INTERNAL if
// the system has no random bits for the secret.
[[nodiscard]] absl::Status DownloadFile(Front& front, const CallPtr& call,
                                        const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ARCHIVES_H_
