// Promises: requests that are answered at once with a future, and those among
// them that are steps of a model.
//
// A model's sequence numbers are consecutive, in whatever order they arrive,
// and each is one step of the adapter (step_order.h); the dispatcher answers a
// repeated one as it did the first.
//
// With a ledger, a step's request is on disk before it is promised. After a
// restart it runs again, and the dispatcher gives the stored reply where it had
// run already.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_STEPS_H_
#define WEFT_SERVER_TINKER_STEPS_H_

#include <functional>
#include <optional>
#include <string>

#include "server/tinker/front.h"

namespace weft::tinker {

// Begins the work; an error it returns means that nothing has begun.
using Task = std::function<absl::Status(Callback<FutureResult> done)>;

// Which future: of a model by its number, or by a name of its own.
struct PromiseId {
  std::string model;
  std::optional<int64_t> seq;
  std::string name;

  [[nodiscard]] std::string ToString() const;
};

// Responds with the future, whose result `task` gives. One that was promised
// before is promised again, and `task` does not run. What may succeed later is
// not promised: the error is the response, or is returned if the call is from
// the ledger.
[[nodiscard]] absl::Status Promise(Front& front, const CallPtr& call,
                                   const PromiseId& id, const Task& task,
                                   const Respond& respond);

struct StepKind {
  bool is_load = false;
};

// As Promise, for a step. Errors: INVALID_ARGUMENT unless `seq` is at least 1
// and at most kMaxAhead ahead; NOT_FOUND (model); ABORTED for a number below
// the latest load; RESOURCE_EXHAUSTED when too much waits; UNAVAILABLE until
// the server has started.
[[nodiscard]] absl::Status PromiseStep(Front& front, const CallPtr& call,
                                       const std::string& model, int64_t seq,
                                       StepTask task, const Respond& respond,
                                       StepKind kind = {});

// retrieve_future and cancel_future.
[[nodiscard]] absl::Status RetrieveFuture(Front& front, const CallPtr& call,
                                          const Respond& respond);
[[nodiscard]] absl::Status CancelFuture(Front& front, const CallPtr& call,
                                        const Respond& respond);

// Has `run` do the requests of the ledger again, one after the other in their
// order, so that few are in memory; then the front is ready. `run` returns
// what may succeed later, and is asked again.
void RestoreSteps(Front& front,
                  std::function<absl::Status(const CallPtr&)> run);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEPS_H_
