// Sampling sessions: what a sampling client samples from, fixed when it is
// made.
//
// A session made from a model pins a snapshot of its weights. A session made
// from a checkpoint has an adapter of its own, which is loaded from it. All
// such sessions of one checkpoint share the adapter; the last one deletes it.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLERS_H_
#define WEFT_SERVER_TINKER_SAMPLERS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

// How the names of adapters begin that were loaded to sample from.
inline constexpr char kSamplerAdapterPrefix[] = "tinker-sampler.";

// save_weights_for_sampler of a model that goes on training.
[[nodiscard]] absl::Status PublishSampler(Front& front, const CallPtr& call,
                                          const Respond& respond);
// create_sampling_session: from a checkpoint, or the base model.
[[nodiscard]] absl::Status CreateSampler(Front& front, const CallPtr& call,
                                         const Respond& respond);
// samplers/*.
[[nodiscard]] absl::Status GetSampler(Front& front, const CallPtr& call,
                                      const Respond& respond);

// Forgets a session's samplers, and the adapters that no other one needs.
void DropSamplersOf(Front& front, const std::string& session);

void RestoreSamplers(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLERS_H_
