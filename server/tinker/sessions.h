// Sessions, and their models and sampling sessions.
//
// A model is an adapter of Weft. A sampling session fixes the weights that a
// sampling client samples from. If it is made from a model, it has a snapshot
// of the model's weights, or is in flight: its samples take the model's latest
// weights, before each token anew. A model keeps the kMaxSnapshots that were
// used last. A sampling session that is made from a checkpoint uses an adapter
// that the front loads from the checkpoint (adapters.h).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_SESSIONS_H_
#define WEFT_SERVER_TINKER_SESSIONS_H_

#include <cstddef>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/tinker/front.h"

namespace weft::server::tinker {

// A session ends if it has no heartbeat for this time.
inline constexpr absl::Duration kSessionTimeout = absl::Hours(1);
// One owner may have at most this many sessions. Above the limit, a new session
// ends the session that has been silent for longest, among those that the
// caller may end. But if none of these has been silent for kSilence, the new
// session is refused. The SDK sends about thirty heartbeats in kSilence.
inline constexpr size_t kMaxSessions = 1000;
inline constexpr absl::Duration kSilence = absl::Minutes(5);

// Ends the sessions that have had no heartbeat for more than kSessionTimeout.
void SweepSessions(Front& front, absl::Time now);

// Reads the sessions from the ledger, or one of them. Each session starts as if
// its last heartbeat had come at `now`.
void RestoreSessions(Front& front, absl::Time now,
                     const std::string& session = "");
// Forgets a session that has gone to another log, and all that is its own.
// Clients that wait for its futures are told to send the requests again.
void LeaveSession(Front& front, const std::string& id);

// Returns the session of a model, a sampling session, or one of their futures,
// by its id, which begins with the session's. Threads: any.
inline absl::string_view SessionOf(absl::string_view id) {
  return id.substr(0, id.find(':'));
}

// Returns whether a session may have this id: 32 letters and digits. Threads:
// any.
bool IsSessionId(absl::string_view id);

// The sequence number of the request that makes a model.
inline constexpr int64_t kCreateSeq = 0;

// Convert between a model's id and its adapter's name: the model
// "SESSION:train:3" is the adapter "SESSION.train.3", where SESSION is an id of
// 32 characters. For all other adapters, the model's id is the adapter's name.
// Threads: any.
std::string AdapterOfModel(absl::string_view model_id);
std::string ModelOfAdapter(absl::string_view adapter_id);

// Returns UNIMPLEMENTED if the server does not run `base_model`, or the error
// of `base_model`. It must be one of Front::model_names, or end in "/" and such
// a name. Upper and lower case are equal. The name may have ":peft:N" behind
// it; returns INVALID_ARGUMENT if N is above the context length.
absl::Status CheckBaseModel(const Front& front,
                            const absl::StatusOr<std::string>& base_model);
// Writes the model to the ledger. `done` gets the outcome after the write.
void KeepModel(Front& front, const Model& model,
               std::function<void(absl::Status)> done);

// Begins to make a model's adapter, and gives the result to `done`. If a
// ModelStart returns an error, nothing has begun and `done` does not run.
using ModelStart = std::function<absl::Status(const Model& model,
                                              Callback<FutureResult> done)>;
// Makes the model that `session_id` and `model_seq_id` of the body name. Writes
// the model to the ledger, runs `start`, and promises a future for its result.
// The model takes steps when the work of `start` has ended. Errors:
// INVALID_ARGUMENT; NOT_FOUND if there is no such session; FAILED_PRECONDITION
// if the owner has too many models; those of Promise.
absl::Status MakeModel(Front& front, const CallPtr& call,
                       const Respond& respond, const ModelStart& start);
// Forgets a model and the sampling sessions of its snapshots. The caller of
// ForgetModel must delete the adapter, or have it deleted by Adapters::Delete,
// which fails its steps.
void ForgetModel(Front& front, const std::string& id);
// Forgets a session's models, and has their adapters deleted
// (Adapters::Delete).
void UnloadModelsOf(Front& front, const std::string& session);

// Reads the models from the ledger, or those of one session. Deletes models
// that have no session. Call it after RestoreSessions.
void RestoreModels(Front& front, const std::string& session = "");

inline constexpr size_t kMaxSnapshots = 32;
// One session may have at most this many sampling sessions without a snapshot.
inline constexpr size_t kMaxSamplers = 1024;

// Returns the id of the sampling session for a snapshot of the model.
std::string SamplerOf(absl::string_view model, absl::string_view snapshot);
// Writes the sampling session of a snapshot that was published to the ledger,
// and adds it to front.samplers, unless it is there. Then releases the snapshot
// that was used least recently, if the adapter has too many, and the snapshot
// of a session in flight, which only marked the step's place. Then runs `done`.
// Ignores snapshots that no sampling session has made.
void KeepPublished(Front& front, const Model& model,
                   const std::string& snapshot,
                   const std::function<void(const absl::Status&)>& done);

// Cancels all samples whose future's id begins with `prefix`. Their futures
// fail, if the cancellation comes in time.
void CancelSamples(Front& front, const std::string& prefix);
// Cancels the samples whose clients are gone: for two minutes nobody has asked
// for the result, and no heartbeat has come from the session. (A client with
// more samples than connections asks for some of them more rarely.) Who asks
// later gets 410, after which the SDK sends the sample again. `now` is a
// SteadyNow.
void SweepSamples(Front& front, absl::Time now);

// Forgets the sampling sessions of a session.
void DropSamplersOf(Front& front, const std::string& session);

// Forgets the sampling sessions of a model's snapshots. The snapshots
// themselves are deleted with the model's adapter.
void DropSnapshotsOf(Front& front, const Model& model);

// Reads the sampling sessions from the ledger, or those of one session. Drops a
// sampling session if its session is gone. Deletes the adapters that earlier
// versions loaded for them. Call it after RestoreSessions.
void RestoreSamplers(Front& front, const std::string& session = "");

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_SESSIONS_H_
