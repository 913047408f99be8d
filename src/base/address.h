// Addresses on which a server listens.
#ifndef WEFT_SRC_BASE_ADDRESS_H_
#define WEFT_SRC_BASE_ADDRESS_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace weft {

struct HostPort {
  std::string host;  // Without brackets.
  int port = 0;
};
// Splits "HOST:PORT" or "[V6]:PORT". Errors: INVALID_ARGUMENT, which names
// `flag`, if the host is empty, an IPv6 host has no brackets, or the port is
// not a number in [0, 65535].
absl::StatusOr<HostPort> ParseHostPort(absl::string_view flag,
                                       absl::string_view address);

// Ends the message about a port that another process has.
inline constexpr char kPortTaken[] =
    ": choose another port, or port 0 for any free one";

// Returns the path of "unix:PATH"; empty if `listen` has another form.
std::string UnixSocketPath(absl::string_view listen);

// Returns whether `host` is "localhost", ::1 or an address in 127.0.0.0/8.
bool IsLoopback(absl::string_view host);

}  // namespace weft

#endif  // WEFT_SRC_BASE_ADDRESS_H_
