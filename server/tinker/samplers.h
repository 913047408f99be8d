// Sampling sessions: what a sampling client samples from, fixed when it is
// made.
//
// A session made from a model pins a snapshot of its weights; a model keeps the
// kMaxSnapshots that were used last. A session made from a checkpoint samples
// from an adapter that was loaded from it (loaded_adapters.h).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLERS_H_
#define WEFT_SERVER_TINKER_SAMPLERS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr size_t kMaxSnapshots = 32;
// Sampling sessions without a snapshot that a session may have.
inline constexpr int64_t kMaxSamplers = 1024;

// save_weights_for_sampler of a model that goes on training.
[[nodiscard]] absl::Status PublishSampler(Front& front, const CallPtr& call,
                                          const Respond& respond);
// create_sampling_session: from a checkpoint, or the base model.
[[nodiscard]] absl::Status CreateSampler(Front& front, const CallPtr& call,
                                         const Respond& respond);
// samplers/*.
[[nodiscard]] absl::Status GetSampler(Front& front, const CallPtr& call,
                                      const Respond& respond);

// Notes that it is sampled from.
void TouchSampler(Front& front, Sampler& sampler);

// Forgets a session's samplers, and the adapters that no other one needs.
void DropSamplersOf(Front& front, const std::string& session);
// Forgets the samplers of a model that is gone, with its snapshots.
void DropSnapshotsOf(Front& front, const Model& model);

void RestoreSamplers(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLERS_H_
