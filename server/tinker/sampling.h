// Handles asample.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLING_H_
#define WEFT_SERVER_TINKER_SAMPLING_H_

#include <string>

#include "absl/time/time.h"
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
// Cancels the samples whose clients are gone: for two minutes nobody has asked
// for the result, and no heartbeat has come from the session. (A client with
// more samples than connections asks for some of them more rarely.) Who asks
// later gets 410, after which the SDK sends the sample again. `now` is a
// SteadyNow.
void SweepSamples(Front& front, absl::Time now);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLING_H_
