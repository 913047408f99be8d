// Downloads of checkpoints that were saved by save_weights_external: a signed
// URL for each file of the PEFT folder.
//
// A URL opens one file to whoever has it, without a key, until it expires or
// the server ends: the signature is made with a secret of the process.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ARCHIVES_H_
#define WEFT_SERVER_TINKER_ARCHIVES_H_

#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr absl::Duration kUrlLifetime = absl::Hours(1);

// external_weights_urls.
[[nodiscard]] absl::Status GetArchive(Front& front, const CallPtr& call,
                                      const Respond& respond);
// What such a URL names. NOT_FOUND for a signature that is not this process's,
// or has expired.
[[nodiscard]] absl::Status DownloadFile(Front& front, const CallPtr& call,
                                        const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ARCHIVES_H_
