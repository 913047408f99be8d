// The flags of weftctl's connection to a server, and its token.
#ifndef WEFT_CLIENT_WEFTCTL_SECURITY_FLAGS_H_
#define WEFT_CLIENT_WEFTCTL_SECURITY_FLAGS_H_

#include <vector>

#include "absl/status/statusor.h"
#include "client/channel.h"
#include "client/weftctl/arguments.h"

namespace weft::weftctl {

// Each flag's default is an environment variable. The token itself has no flag,
// because everybody on the machine can see command lines.
[[nodiscard]] std::vector<FlagSpec> SecurityFlags();

// Reads the files that the flags name, and WEFT_TOKEN. Errors: UsageError
// naming the flag whose file cannot be read.
[[nodiscard]] absl::StatusOr<client::Security> ReadSecurity(
    const Arguments& arguments);

}  // namespace weft::weftctl

#endif  // WEFT_CLIENT_WEFTCTL_SECURITY_FLAGS_H_
