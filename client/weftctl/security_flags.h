// weftctl's flags for TLS and for the token.
#ifndef WEFT_CLIENT_WEFTCTL_SECURITY_FLAGS_H_
#define WEFT_CLIENT_WEFTCTL_SECURITY_FLAGS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "client/channel.h"
#include "client/weftctl/arguments.h"

namespace weft::weftctl {

// Returns the flags. A flag that is not given takes its value from an
// environment variable. No flag holds the token itself, because everybody on
// the machine can see command lines.
[[nodiscard]] std::vector<FlagSpec> SecurityFlags();

// Reads the files that the flags name, and WEFT_TOKEN. Errors: UsageError,
// which names the flag, if its file is empty or cannot be read.
[[nodiscard]] absl::StatusOr<client::Security> ReadSecurity(
    const Arguments& arguments);

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_SECURITY_FLAGS_H_
