// Promises futures. A request that takes long is answered at once with the id
// of a future, which gets the result later. Most of these requests are steps of
// a model.
//
// The requests of a model have consecutive sequence numbers, and may arrive in
// any order. Each is one step of the adapter (step_order.h). If a step is
// repeated, the dispatcher gives the same answer again.
//
// With --state-dir, a step's request is on disk before its future is promised.
// After a restart the front runs the request again. If the step was completed
// before, the dispatcher gives its stored reply.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEPS_H_
#define WEFT_SERVER_TINKER_STEPS_H_

#include <functional>
#include <optional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// Begins the work whose result a future gets. If it returns an error, nothing
// has begun and `done` does not run.
using Task = std::function<absl::Status(Callback<FutureResult> done)>;

// The id of a future: a model, and either a sequence number or a name.
struct PromiseId {
  std::string model;
  std::optional<int64_t> seq;
  std::string name;

  // Returns "MODEL:SEQ" or "MODEL:NAME".
  [[nodiscard]] std::string ToString() const;
};

// Responds with the id of a future, to which `task` gives the result. If this
// future exists already, responds with its id, and `task` does not run. If
// `task` returns an error that may pass (RetryMillis), there is no future. The
// error is then the response; for a request from the ledger, Promise returns
// it.
[[nodiscard]] absl::Status Promise(Front& front, const CallPtr& call,
                                   const PromiseId& id, const Task& task,
                                   const Respond& respond);

struct StepKind {
  bool is_load = false;
};

// Like Promise, for a step of a model: `task` runs in the step's turn. Errors:
// INVALID_ARGUMENT if `seq` is below 1, or more than kMaxAhead above
// StepLine::next; NOT_FOUND if there is no such model; ABORTED if `seq` is
// below the latest load; RESOURCE_EXHAUSTED if too many requests wait;
// UNAVAILABLE while the server starts.
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
// requests again with `run`, one after the other, in the order of their
// sequence numbers. So few of them are in memory at once. If `run` returns an
// error, runs the request again later. At the end sets Front::ready.
void RestoreSteps(Front& front,
                  std::function<absl::Status(const CallPtr&)> run);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEPS_H_
