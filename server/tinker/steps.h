// Promises futures: answers a slow request with the id of a future, which gets
// the result later.
//
// The steps of a model have consecutive sequence numbers, and may arrive in any
// order. The number of a step in the engine is its sequence number, and the
// engine keeps the order.
//
// A client gets the future of a step when the engine keeps it (KeepStep). The
// engine has the result, too (Engine::Retrieve), also after a restart.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEPS_H_
#define WEFT_SERVER_TINKER_STEPS_H_

#include <cstdint>
#include <optional>
#include <string>

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
  std::string ToString() const;
};

// The place of a step: its model and its sequence number.
struct StepPlace {
  std::string model;
  int64_t seq = 0;
};
// Reads `model_id` and `seq_id`.
absl::StatusOr<StepPlace> ReadPlace(const Json& body);

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
absl::Status Promise(Front& front, const CallPtr& call, const PromiseId& id,
                     const Task& task, const Respond& respond);

// The fields of the note that the engine keeps with a step.
inline constexpr char kTokens[] = "tokens";        // That a step trains.
inline constexpr char kPath[] = "path";            // That a step loads.
inline constexpr char kOptimizer[] = "optimizer";  // It loads the optimizer.
inline constexpr char kCaller[] = "caller";        // Absent: the model's.

// Runs `task`, which gives a step to the engine by a call of `rpc`. Responds
// with the id of a future when the engine keeps the step, or with the error if
// the engine cannot take the step now. If the future exists already, only
// responds with its id. A step whose task fails for good is kept, too, and
// fails in its turn.
// Errors: INVALID_ARGUMENT if the number is below 1; NOT_FOUND if there is no
// such model; UNAVAILABLE while the server starts or the model is being made.
absl::Status PromiseStep(Front& front, const CallPtr& call, Rpc rpc,
                         const StepPlace& place, Json note, StepStart task,
                         const Respond& respond);

// Has futures wait for the steps that the engine resumed after a restart.
void AttachSteps(Front& front);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_STEPS_H_
