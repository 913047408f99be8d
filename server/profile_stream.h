// ServerService.Profile.
#ifndef WEFT_SERVER_PROFILE_STREAM_H_
#define WEFT_SERVER_PROFILE_STREAM_H_

#include "server/raw_service.h"

namespace weft {

// The call sends the trace in pieces of at most 1 MiB when the profile has
// ended. If the client goes away, the profile ends early.
void AddProfile(RawService* service);

}  // namespace weft

#endif  // WEFT_SERVER_PROFILE_STREAM_H_
