// Handles asample.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLING_H_
#define WEFT_SERVER_TINKER_SAMPLING_H_

#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// Handles asample: promises the future of a sample. If a request repeats a
// `seq_id` of its sampling session, it gets the same future again.
[[nodiscard]] absl::Status RunSample(Front& front, const CallPtr& call,
                                     const Respond& respond);
// Cancels a sample of `owner`. `id` is the id of the sample's future, which
// fails if the cancellation comes in time. Does nothing if the sample has
// ended.
void CancelSample(Front& front, const std::string& owner,
                  const std::string& id);
// Does so for all samples of an owner's session, when the session ends.
void CancelSamplesOf(Front& front, const std::string& owner,
                     const std::string& session);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLING_H_
