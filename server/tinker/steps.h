// Promises: requests that are answered at once with a future. Most of them are
// steps of a model.
//
// A model's sequence numbers are consecutive. Its requests may arrive in any
// order, and each is one step of the adapter (step_order.h). If a step is
// repeated, the dispatcher gives the same answer again.
//
// With a ledger, a step's request is on disk before its future is promised.
// After a restart the request runs again; if it had run already, the dispatcher
// gives its stored reply.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEPS_H_
#define WEFT_SERVER_TINKER_STEPS_H_

#include <functional>
#include <optional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// Begins the work of a promise. If it returns an error, nothing has begun and
// `done` does not run.
using Task = std::function<absl::Status(Callback<FutureResult> done)>;

// The name of a future: the model with either a sequence number or a name.
struct PromiseId {
  std::string model;
  std::optional<int64_t> seq;
  std::string name;

  // Returns "MODEL:SEQ" or "MODEL:NAME".
  [[nodiscard]] std::string ToString() const;
};

// Responds with the id of a future, to which `task` gives the result. If this
// future was promised before, it is promised again and `task` does not run. If
// `task` fails so that it may succeed later (RetryMillis), nothing is promised:
// the error is the response, or is returned if the ledger had the call.
[[nodiscard]] absl::Status Promise(Front& front, const CallPtr& call,
                                   const PromiseId& id, const Task& task,
                                   const Respond& respond);

struct StepKind {
  bool is_load = false;
};

// Like Promise, for a step of a model: `task` runs in the step's turn. Errors:
// INVALID_ARGUMENT if `seq` is below 1 or more than kMaxAhead ahead; NOT_FOUND
// if there is no such model; ABORTED if `seq` is below the latest load;
// RESOURCE_EXHAUSTED if too many requests wait; UNAVAILABLE while the server
// starts.
[[nodiscard]] absl::Status PromiseStep(Front& front, const CallPtr& call,
                                       const std::string& model, int64_t seq,
                                       StepTask task, const Respond& respond,
                                       StepKind kind = {});

// Handle retrieve_future and cancel_future.
[[nodiscard]] absl::Status RetrieveFuture(Front& front, const CallPtr& call,
                                          const Respond& respond);
[[nodiscard]] absl::Status CancelFuture(Front& front, const CallPtr& call,
                                        const Respond& respond);

// Waits until the adapters of all models are restored. Then runs the ledger's
// requests again by `run`, one after the other in the order of their numbers,
// so that few are in memory. Then the front is ready. If `run` returns an
// error, the request is tried again.
void RestoreSteps(Front& front,
                  std::function<absl::Status(const CallPtr&)> run);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEPS_H_
