// Handles asample. Samples for which the engine has no room wait in the front
// (sample_queue.h).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLING_H_
#define WEFT_SERVER_TINKER_SAMPLING_H_

#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// Handles asample: promises the future of a sample. A repeated request gets the
// same future.
[[nodiscard]] absl::Status RunSample(Front& front, const CallPtr& call,
                                     const Respond& respond);
// Cancels a sample of `owner`. `id` is the id of its future, which then fails.
// Does nothing if the sample has ended.
void CancelSample(Front& front, const std::string& owner,
                  const std::string& id);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLING_H_
