// Sampling sessions: the weights that a sampling client samples from, which are
// fixed when the session is made.
//
// A session made from a model has a snapshot of its weights; a model keeps the
// kMaxSnapshots that were used last. A session made from a checkpoint samples
// from an adapter that is loaded from it (loaded_adapters.h).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLERS_H_
#define WEFT_SERVER_TINKER_SAMPLERS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr size_t kMaxSnapshots = 32;
// The most sampling sessions of a session that have no snapshot.
inline constexpr int64_t kMaxSamplers = 1024;

// Handles save_weights_for_sampler with a `sampling_session_seq_id`, as a step
// of the model: publishes a snapshot and makes a sampling session for it.
[[nodiscard]] absl::Status PublishSampler(Front& front, const CallPtr& call,
                                          const Respond& respond);
// Handles create_sampling_session: from a checkpoint, or for the base model.
[[nodiscard]] absl::Status CreateSampler(Front& front, const CallPtr& call,
                                         const Respond& respond);
// Handles samplers/*: describes a sampling session.
[[nodiscard]] absl::Status GetSampler(Front& front, const CallPtr& call,
                                      const Respond& respond);

// Notes that the sampling session is used now.
void TouchSampler(Front& front, Sampler& sampler);

// Forgets a session's sampling sessions, and gives back their use of loaded
// adapters.
void DropSamplersOf(Front& front, const std::string& session);
// Forgets the sampling sessions of a model. Its snapshots go with its adapter.
void DropSnapshotsOf(Front& front, const Model& model);

// Reads the sampling sessions of the ledger; call it after RestoreSessions. It
// waits for the disk.
void RestoreSamplers(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLERS_H_
