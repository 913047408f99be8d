// Saves and loads checkpoints of models.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_WEIGHTS_H_
#define WEFT_SERVER_TINKER_WEIGHTS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// Handle save_weights, save_weights_for_sampler and save_weights_external,
// which save checkpoints of the kinds training, sampler and external. Each
// request is a step. But if save_weights_for_sampler has a
// `sampling_session_seq_id`, PublishSampler handles the request.
[[nodiscard]] absl::Status SaveWeights(Front& front, const CallPtr& call,
                                       const Respond& respond);
[[nodiscard]] absl::Status SaveWeightsForSampler(Front& front,
                                                 const CallPtr& call,
                                                 const Respond& respond);
[[nodiscard]] absl::Status SaveWeightsExternal(Front& front,
                                               const CallPtr& call,
                                               const Respond& respond);

// Handles load_weights. With `model_id`, the request is a step of this model.
// Without `model_id`, the request makes a model.
[[nodiscard]] absl::Status LoadWeights(Front& front, const CallPtr& call,
                                       const Respond& respond);
// Copies a checkpoint of the caller's tenant to a run of its own, and responds
// with the copy's path. The copy is a run without an adapter. If a request that
// is repeated has made the copy, responds with its path, too. Errors:
// RESOURCE_EXHAUSTED while the owner's last copy has not ended.
[[nodiscard]] absl::Status CopyWeights(Front& front, const CallPtr& call,
                                       const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_WEIGHTS_H_
