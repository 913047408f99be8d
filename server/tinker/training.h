// Handles forward_backward, forward and optim_step. Each request is a step of a
// model (PromiseStep). If a body parses but its data are bad, the request
// succeeds and the step's future fails.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_TRAINING_H_
#define WEFT_SERVER_TINKER_TRAINING_H_

#include "server/tinker/front.h"

namespace weft::tinker {

[[nodiscard]] absl::Status RunForwardBackward(Front& front, const CallPtr& call,
                                              const Respond& respond);
[[nodiscard]] absl::Status RunOptimStep(Front& front, const CallPtr& call,
                                        const Respond& respond);

// Refuses create_custom_loss. The SDK's forward_backward_custom computes such a
// loss in the client.
[[nodiscard]] absl::Status RefuseCustomLoss(Front& front, const CallPtr& call,
                                            const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_TRAINING_H_
