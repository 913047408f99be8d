// Refuses what the Tinker API has and Weft does not offer. A field that asks
// for such a thing must not be ignored, because its caller relies on it.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_REFUSALS_H_
#define WEFT_SERVER_TINKER_REFUSALS_H_

#include "absl/status/status.h"
#include "server/tinker/fields.h"

namespace weft::tinker {

// Returns the refusal of the loss stable_reinforce, and of the samples that are
// recorded for it.
[[nodiscard]] absl::Status NoStableReinforce();

// Returns UNIMPLEMENTED if the body has a field that asks for what Weft does
// not offer. The message says what the caller can do instead. A field that is
// null, false, zero or empty asks for nothing.
[[nodiscard]] absl::Status RefuseFields(const Json& body);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_REFUSALS_H_
