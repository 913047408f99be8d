// Serves downloads of checkpoints that save_weights_external has saved. Each
// file of the PEFT folder has a signed URL.
//
// A signed URL lets anyone read its file without an API key, until the URL
// expires or the server ends. Each server process signs with a new secret.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ARCHIVES_H_
#define WEFT_SERVER_TINKER_ARCHIVES_H_

#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr absl::Duration kUrlLifetime = absl::Hours(1);

// Handles external_weights_urls: responds with the signed URLs of the
// checkpoint's two PEFT files. Errors: INVALID_ARGUMENT if the checkpoint's
// kind is not kExternal.
[[nodiscard]] absl::Status GetArchive(Front& front, const CallPtr& call,
                                      const Respond& respond);
// Serves the file of a signed URL. Errors: NOT_FOUND if the URL has expired, or
// if this process has not signed it; UNAVAILABLE if too many reads wait.
[[nodiscard]] absl::Status DownloadFile(Front& front, const CallPtr& call,
                                        const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ARCHIVES_H_
