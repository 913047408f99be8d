// The handlers of the routes (route_table.cc), by the file that has them, and
// what they share.
// Threads: the front's, but any for ReadTrain.
#ifndef WEFT_SERVER_TINKER_HANDLERS_H_
#define WEFT_SERVER_TINKER_HANDLERS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/tinker/front.h"
#include "src/request/reply.h"

namespace weft::server::tinker {

// Handles one request. Calls `Respond` once, now or later. If the handler
// returns an error instead, its caller responds with the error.
using Handler = absl::Status(Front&, const CallPtr&, const Respond&);
// Handles a request that is answered at once, with the JSON or the error that
// it returns.
using Answer = absl::StatusOr<Json>(Front&, const Call&);

// Responds with the JSON or the error.
void Reply(const Respond& respond, const absl::StatusOr<Json>& json);

// Give an error to the client, or to those who wait for a result.
void Fail(const Respond& respond, const absl::Status& error);
template <typename T>
void Fail(const Callback<T>& done, const absl::Status& error) {
  done(error);
}

// Returns a callback for a result of the engine. An error fails `done`, a
// Respond or a Callback. A value is passed to `run`.
template <typename Done, typename Run>
auto IfOk(Done done, Run run) {
  return [done = std::move(done), run = std::move(run)](const auto& result) {
    if (!result.ok()) return Fail(done, result.status());
    run(*result);
  };
}

// Returns such a callback that responds with the JSON or the error that `make`
// returns.
template <typename Make>
auto ReplyWith(Respond respond, Make make) {
  return IfOk(respond, [respond, make = std::move(make)](const auto& value) {
    Reply(respond, make(value));
  });
}

// credentials.cc

// Returns a JWT for the caller's key, or the JWT that the caller has.
Answer GetAuthToken;
// Returns the names of the caller's token and tenant.
Answer GetApiKey;

// accounts.cc

// Returns the counts of the hours [starting_on, ending_before) of the query, in
// the form of the SDK's type BillingUsageResponse, without prices. A caller
// gets its owner's, and one that sees all adapters those of all owners. Errors:
// INVALID_ARGUMENT unless both are whole hours, at most 14 days apart, and the
// first is not in the future.
Answer GetUsage;
// Returns the caller's events of one day of UTC, oldest first, in the form of
// the SDK's type AuditLogResponse. A caller that sees all adapters gets those
// of all owners. The query has `day` (default: today) and `event_type`.
Answer GetAuditLog;
// Responds with the number and the bytes of the caller's checkpoints.
Handler GetStorage;

// sessions.cc

// Returns "ok". Errors: UNAVAILABLE while the engine starts or drains.
Answer GetHealth;
// Return the settings that the SDK asks for, and the model that the server
// runs. GetCapabilities has the errors of GetHealth.
Answer GetClientConfig, GetDynamicConfig, GetCapabilities;
// Accepts telemetry and drops it.
Answer TakeTelemetry;
// Makes a session, writes it to the ledger, and then responds with its id or
// the error of the write. If a request of the owner with the same idempotency
// key has made a session that has not ended, responds with this session's id.
// Errors: RESOURCE_EXHAUSTED if the owner has kMaxSessions sessions, and none
// of them may be ended; the errors of NewId.
Handler CreateSession;
// Takes a heartbeat. Errors: ABORTED (410) if the session is unknown, so that
// the client sends no more heartbeats.
Answer BeatSession;
// Ends a session with its models and sampling sessions. Does nothing if the
// session has ended already. Errors: PERMISSION_DENIED if the session has
// models and the token lacks the scope train, or if the session has sampling
// sessions and the token lacks both the scope sample and the scope train.
Answer FinishSession;
// Returns a page of the ids of the caller's sessions.
Answer ListSessions;
// Returns the ids of a session's models and sampling sessions, and the metadata
// and the name that the client gave the session.
Answer GetSession;
// Responds with one page of the caller's sessions that have not ended and match
// the body (the SDK's type SessionSearchRequest), newest first. Errors:
// UNIMPLEMENTED for projects and for other owners.
Handler SearchSessions;

// models.cc

// CreateModel and UnloadModel promise a future.
Handler CreateModel, GetModelInfo, UnloadModel;

// training.cc

// Each request is a step of a model (PromiseStep). If a body parses but its
// data are bad, the request succeeds and the step's future fails.
Handler RunForwardBackward, RunOptimStep;
// Parses and translates the body for RunForwardBackward: large data take long.
absl::Status ReadTrain(const Front& front, Call* call);
// Promises {"loss_id"}, the session's id and the number custom_loss_seq_id. A
// request that comes again gets the same id. The future fails with
// INVALID_ARGUMENT, which names the node, for a graph that cannot run; with
// ALREADY_EXISTS if the number has another loss.
Handler CreateCustomLoss;

// weights.cc

// Save checkpoints of the kinds training, sampler and external. Each request is
// a step. But if save_weights_for_sampler has a `sampling_session_seq_id`,
// PublishSampler handles the request.
Handler SaveWeights, SaveWeightsForSampler, SaveWeightsExternal;
// With `model_id`, the request is a step of this model. Without `model_id`, the
// request makes a model.
Handler LoadWeights;
// transfers.cc

// Copies a checkpoint of the caller's tenant to a run of its own, and responds
// with the copy's path. The copy is a run without an adapter. If a request that
// is repeated has made the copy, responds with its path, too. Errors:
// RESOURCE_EXHAUSTED while the owner's last copy has not ended.
Handler CopyWeights;
// Responds with the signed URLs of the two PEFT files of a checkpoint that
// save_weights_external has saved. A signed URL lets anyone read its file
// without an API key, until the URL expires or the server ends. Errors:
// INVALID_ARGUMENT if the path is malformed or its kind is not kExternal; those
// of FindCheckpoint.
Handler GetArchive;
// Redirects to a tar archive of a checkpoint's PEFT files, of any kind, whose
// URL is signed as those are. SDKs up to 0.33 ask for it. Errors: those of
// FindCheckpoint.
Handler RedirectToArchive;
// Serves the file of a signed URL, or responds with the error if the file
// cannot be opened. Errors: NOT_FOUND if the URL has expired, or if this
// process has not signed it; INTERNAL if the system has no random bits for the
// secret.
Handler DownloadFile;

// sampling.cc

// Handles save_weights_for_sampler with a `sampling_session_seq_id`. As a step
// of the model, publishes a snapshot and makes a sampling session for it
// (KeepPublished).
Handler PublishSampler;
// Makes a sampling session from a checkpoint, or for the base model.
Handler CreateSampler;
// Describes a sampling session.
Handler GetSampler;
// Promises the future of a sample. If a request repeats a `seq_id` of its
// sampling session, it gets the same future again.
Handler RunSample;
// Cancels a sample by the id of its future, which fails if the cancellation
// comes in time. Does nothing if the sample has ended.
Answer CancelFuture;

// steps.cc

Handler RetrieveFuture;

// checkpoints.cc

Handler ListRuns, GetRun, ListRunCheckpoints, ListAllCheckpoints;
Handler DeleteCheckpoint, SetCheckpointTtl, GetWeightsInfo;

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_HANDLERS_H_
