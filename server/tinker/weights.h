// Saves and loads checkpoints of models.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_WEIGHTS_H_
#define WEFT_SERVER_TINKER_WEIGHTS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Handle save_weights, save_weights_for_sampler and save_weights_external, each
// a step that saves a checkpoint of its kind. save_weights_for_sampler with a
// `sampling_session_seq_id` goes to PublishSampler instead.
[[nodiscard]] absl::Status SaveWeights(Front& front, const CallPtr& call,
                                       const Respond& respond);
[[nodiscard]] absl::Status SaveWeightsForSampler(Front& front,
                                                 const CallPtr& call,
                                                 const Respond& respond);
[[nodiscard]] absl::Status SaveWeightsExternal(Front& front,
                                               const CallPtr& call,
                                               const Respond& respond);

// Handles load_weights: as a step of a model, or as the request that makes a
// model if the body has no `model_id`.
[[nodiscard]] absl::Status LoadWeights(Front& front, const CallPtr& call,
                                       const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_WEIGHTS_H_
