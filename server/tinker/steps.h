// Promises futures: answers a slow request with the id of a future, which gets
// the result later.
//
// The steps of a model have consecutive sequence numbers, and may arrive in any
// order. The number of a step in the engine is its sequence number, and the
// engine keeps the order.
//
// With --state-dir, a step's request is on disk before its future is given.
// After a restart the front runs the request again, unless the step had ended.
// The result of such a step is in the engine (Engine::Retrieve).
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEPS_H_
#define WEFT_SERVER_TINKER_STEPS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "server/call/caller.h"
#include "server/tinker/front.h"
#include "server/tinker/futures.h"
#include "server/tinker/sessions.h"
#include "src/request/step.h"

namespace weft::server::tinker {

// The id of a future: a model, and either a sequence number or a name.
struct PromiseId {
  std::string model;
  std::optional<int64_t> seq;
  std::string name;

  // Returns "MODEL:SEQ" or "MODEL:NAME".
  [[nodiscard]] std::string ToString() const;
};

// The place of a step: its model and its sequence number.
struct StepPlace {
  std::string model;
  int64_t seq = 0;
};
// Reads `model_id` and `seq_id`.
[[nodiscard]] absl::StatusOr<StepPlace> ReadPlace(const Json& body);

// Returns a request of weft.v1 for the step of a model.
template <typename Request>
Request RequestOf(const StepPlace& place) {
  Request request;
  request.set_adapter_id(AdapterOfModel(place.model));
  request.set_step(static_cast<uint64_t>(place.seq));
  return request;
}

// Runs `task`, which gives its result to a future, and then responds with the
// future's id. If the future exists already, only responds with its id. If `id`
// has a sequence number, first writes the request to the ledger.
// If the write or `task` fails with a transient error (RetryMillis), drops the
// future and responds with the error. Any other error becomes the future's
// result. A request from the ledger gets no response. For such a request,
// Promise returns the transient error.
[[nodiscard]] absl::Status Promise(Front& front, const CallPtr& call,
                                   const PromiseId& id, const Task& task,
                                   const Respond& respond);

// What the request of a step takes.
struct StepCost {
  int64_t bytes = 0;     // Of the message that `task` keeps.
  bool replays = false;  // It takes more from records of samples as it begins.
};

// Charges for the request of a model's step until the step ends. Writes the
// request to the ledger, and responds with the id of a future, or with the
// error of the write. Then runs `task`, which gives the step to the engine by a
// call of `rpc`, and runs it again after a transient error (RetryMillis). If
// the future exists already, only responds with its id. A request that is too
// large for the memory of the server is a step that fails.
// Errors: INVALID_ARGUMENT if the number is below 1; NOT_FOUND if there is no
// such model; those of FairBudget::ReserveRequest; UNAVAILABLE while the server
// starts.
[[nodiscard]] absl::Status PromiseStep(Front& front, const CallPtr& call,
                                       Rpc rpc, const StepPlace& place,
                                       const StepCost& cost, StepTask task,
                                       const Respond& respond);

// Gives the step to the engine. A step whose task fails is given to the engine,
// too, to fail in its turn, so that the steps after it can run. Fails the
// step's future if the model is gone.
void EnterStep(Front& front, const std::string& model, int64_t seq,
               ArrivedStep step);
// Lets the model's steps begin. Call it when the request that makes the model
// has ended.
void OpenLine(Front& front, const std::string& model);

// What follows converts the results of a model's steps to the results of their
// futures. Any thread may call it.

// Return the id of a session's sampling session with this number, and the name
// of the snapshot that it samples from.
[[nodiscard]] std::string SamplerId(absl::string_view session, int64_t number);
[[nodiscard]] std::string SnapshotName(int64_t number);

// Return the result of a future: AdapterInfo is the result of a load, and
// PublishedSnapshot that of a save for a sampling session.
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const TrainResult& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const OptimStepResult& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const CheckpointInfo& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const AdapterInfo& result);
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const PublishedSnapshot& result);
// `caller` made the model. An error names the caller's adapters.
[[nodiscard]] FutureResult OutputOf(absl::string_view model,
                                    const Caller& caller,
                                    const StepResult& result);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_STEPS_H_
