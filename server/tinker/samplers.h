// Makes and ends sampling sessions. A sampling session fixes the weights that a
// sampling client samples from.
//
// A sampling session that is made from a model has a snapshot of the model's
// weights, or is in flight: its samples take the model's latest weights, before
// each token anew. A model keeps the kMaxSnapshots most recently used sessions.
// A sampling session that is made from a checkpoint uses an adapter that the
// front loads from the checkpoint (loaded_adapters.h).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SAMPLERS_H_
#define WEFT_SERVER_TINKER_SAMPLERS_H_

#include "server/tinker/front.h"

namespace weft::tinker {

inline constexpr size_t kMaxSnapshots = 32;
// One session may have at most this many sampling sessions without a snapshot.
inline constexpr int64_t kMaxSamplers = 1024;

// Handles save_weights_for_sampler with a `sampling_session_seq_id`. As a step
// of the model, publishes a snapshot and makes a sampling session for it. For a
// session in flight the snapshot only marks the step's place among the model's
// steps, and is released at once.
[[nodiscard]] absl::Status PublishSampler(Front& front, const CallPtr& call,
                                          const Respond& respond);
// Handles create_sampling_session: from a checkpoint, or for the base model.
[[nodiscard]] absl::Status CreateSampler(Front& front, const CallPtr& call,
                                         const Respond& respond);
// Handles samplers/*: describes a sampling session.
[[nodiscard]] absl::Status GetSampler(Front& front, const CallPtr& call,
                                      const Respond& respond);

// Notes in Sampler::used that the sampling session is used now.
void TouchSampler(Front& front, Sampler& sampler);

// Forgets the sampling sessions of a session. If a sampling session uses a
// loaded adapter, calls LeaveAdapter for this adapter.
void DropSamplersOf(Front& front, const std::string& session);
// Forgets the sampling sessions of a model's snapshots. The snapshots
// themselves are deleted with the model's adapter.
void DropSnapshotsOf(Front& front, const Model& model);

// Reads the sampling sessions from the ledger. Drops a sampling session if its
// session is gone. Call it after RestoreSessions.
void RestoreSamplers(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_SAMPLERS_H_
