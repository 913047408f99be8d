// A machine-readable reason for an error: a name and some values, attached to
// an absl::Status. Status messages are for people and may change. Names of
// reasons and keys of values do not change.
#ifndef WEFT_SRC_BASE_REASON_H_
#define WEFT_SRC_BASE_REASON_H_

#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace weft {

struct Reason {
  std::string name;  // For example SHARE_IN_USE. Has no line breaks.
  // For example {"limit", "64"}. No key or value has a line break, and no key
  // has "=".
  std::map<std::string, std::string> values;

  friend bool operator==(const Reason&, const Reason&) = default;
};

// Returns `status` with the reason. REQUIRES: `status` is an error.
absl::Status WithReason(absl::Status status, const Reason& reason);
// Returns nullopt if the status carries no reason.
std::optional<Reason> FindReason(const absl::Status& status);

// Returns the answer to a call for a state, or for an adapter, that the server
// at `owner` (HOST:PORT) has: FAILED_PRECONDITION with the reason MOVED. If
// `owner` is empty, nobody is known to have it: UNAVAILABLE with the reason
// STANDBY. A server that has other adapters than the call's names its
// `adapter`, so that clients do not leave it for their calls for others.
absl::Status MovedTo(const std::string& owner, const std::string& adapter = "");

}  // namespace weft

#endif  // WEFT_SRC_BASE_REASON_H_
