// Answers who a caller is, and what its tenant has used and done through this
// front.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_ACCOUNTS_H_
#define WEFT_SERVER_TINKER_ACCOUNTS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Responds with Call::jwt.
[[nodiscard]] absl::Status GetAuthToken(Front& front, const CallPtr& call,
                                        const Respond& respond);
// Responds with the names of the caller's token and tenant.
[[nodiscard]] absl::Status GetApiKey(Front& front, const CallPtr& call,
                                     const Respond& respond);
// Refuses to delete the caller's token, which is in the operator's file.
[[nodiscard]] absl::Status RefuseKeyDeletion(Front& front, const CallPtr& call,
                                             const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_ACCOUNTS_H_
