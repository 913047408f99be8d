// Checkpoints of models: saved, loaded, and saved to sample from.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_WEIGHTS_H_
#define WEFT_SERVER_TINKER_WEIGHTS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// save_weights, save_weights_for_sampler with a path, save_weights_external: a
// checkpoint of its kind.
[[nodiscard]] absl::Status SaveWeights(Front& front, const CallPtr& call,
                                       const Respond& respond);
[[nodiscard]] absl::Status SaveWeightsForSampler(Front& front,
                                                 const CallPtr& call,
                                                 const Respond& respond);
[[nodiscard]] absl::Status SaveWeightsExternal(Front& front,
                                               const CallPtr& call,
                                               const Respond& respond);

// load_weights: into a model, or as a new one's first request.
[[nodiscard]] absl::Status LoadWeights(Front& front, const CallPtr& call,
                                       const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_WEIGHTS_H_
