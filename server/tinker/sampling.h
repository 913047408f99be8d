// asample.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLING_H_
#define WEFT_SERVER_TINKER_SAMPLING_H_

#include "server/tinker/front.h"

namespace weft::tinker {

[[nodiscard]] absl::Status RunSample(Front& front, const CallPtr& call,
                                     const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLING_H_
