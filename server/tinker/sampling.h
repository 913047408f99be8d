// asample. Samples that the engine has no room for wait in sample_queue.h.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLING_H_
#define WEFT_SERVER_TINKER_SAMPLING_H_

#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

[[nodiscard]] absl::Status RunSample(Front& front, const CallPtr& call,
                                     const Respond& respond);
// Ends a sample of this owner, if it has not ended: its future fails.
void CancelSample(Front& front, const std::string& owner,
                  const std::string& id);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLING_H_
