// Promises futures: answers a slow request with the id of a future, which gets
// the result later.
//
// The steps of a model have consecutive sequence numbers, and may arrive in any
// order. The number of a step in the engine is its sequence number, and the
// engine keeps the order.
//
// A future of a step is promised when the engine keeps the step (KeepStep). The
// engine has the result, too (Engine::Retrieve), also after a restart.
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

// The fields of the note that the engine keeps with a step.
inline constexpr char kTokens[] = "tokens";        // That a step trains.
inline constexpr char kPath[] = "path";            // That a step loads.
inline constexpr char kOptimizer[] = "optimizer";  // It loads the optimizer.
inline constexpr char kCaller[] = "caller";        // Absent: the model's.

// Charges for the request of a model's step until the step ends. Then runs
// `task`, which gives the step to the engine by a call of `rpc`, and runs it
// again after a transient error (RetryMillis). Responds with the id of a future
// when the engine keeps the step, or with the error if the log has no room. If
// the future exists already, only responds with its id. A request that is too
// large for the memory of the server is a step that fails.
// Errors: INVALID_ARGUMENT if the number is below 1; NOT_FOUND if there is no
// such model; those of FairBudget::ReserveRequest; UNAVAILABLE while the server
// starts.
[[nodiscard]] absl::Status PromiseStep(Front& front, const CallPtr& call,
                                       Rpc rpc, const StepPlace& place,
                                       const StepCost& cost, Json note,
                                       StepTask task, const Respond& respond);

// Has futures wait for the steps that the engine resumed after a restart.
void AttachSteps(Front& front);

// Gives the step to the engine. A step whose task fails is given to the engine,
// too, to fail in its turn, so that the steps after it can run. Fails the
// step's future if the model is gone.
void EnterStep(Front& front, const std::string& model, int64_t seq,
               ArrivedStep step);
// Lets the model's steps begin. Call it when the request that makes the model
// has ended.
void OpenLine(Front& front, const std::string& model);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_STEPS_H_
