// Downloads of checkpoints that save_weights_external has saved. Each file of
// the PEFT folder has a signed URL.
//
// Whoever has such a URL can read this one file, without a key, until the URL
// expires or the server ends: the process makes a new secret at each start.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ARCHIVES_H_
#define WEFT_SERVER_TINKER_ARCHIVES_H_

#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr absl::Duration kUrlLifetime = absl::Hours(1);

// Handles external_weights_urls: responds with the URLs of the two files.
// Errors: INVALID_ARGUMENT if the checkpoint has another kind.
[[nodiscard]] absl::Status GetArchive(Front& front, const CallPtr& call,
                                      const Respond& respond);
// Serves the file of a signed URL. Errors: NOT_FOUND if the signature is not
// from this process or has expired; UNAVAILABLE if too many reads wait.
[[nodiscard]] absl::Status DownloadFile(Front& front, const CallPtr& call,
                                        const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ARCHIVES_H_
