// Signatures that only this process can make: of download URLs, and of the ids
// of samples' futures, so that nobody can guess one.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_SIGNATURE_H_
#define WEFT_SERVER_TINKER_SIGNATURE_H_

#include <string>

#include "absl/status/statusor.h"

namespace weft::tinker {

// Returns the HMAC-SHA256 of `text` in hex, with a secret that each process
// draws anew. Errors: INTERNAL if the system has no random bits for the secret.
[[nodiscard]] absl::StatusOr<std::string> Sign(const std::string& text);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SIGNATURE_H_
