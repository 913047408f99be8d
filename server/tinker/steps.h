// Promises: requests that are answered at once with a future, and those among
// them that are steps of a model.
//
// A model's sequence numbers are consecutive, in whatever order they arrive,
// and each is one step of the adapter: the dispatcher puts them in order, waits
// for gaps, and answers a repeated one as it did the first. A request that is
// refused, or fails so that its step has not happened, leaves no gap: its step
// becomes one that does nothing.
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
// not promised: the error is returned.
[[nodiscard]] absl::Status Promise(Front& front, const CallPtr& call,
                                   const PromiseId& id, const Task& task,
                                   const Respond& respond);

// As Promise, for a step: `start` gets its number. `seq` must be at least 1.
using StepTask =
    std::function<absl::Status(uint64_t step, Callback<FutureResult> done)>;
[[nodiscard]] absl::Status PromiseStep(Front& front, const CallPtr& call,
                                       const std::string& model, int64_t seq,
                                       StepTask task, const Respond& respond);

// Says that step `seq` of the model loads a checkpoint: later ones wait. The
// end of the load says which step it has led to, or that it has failed.
void BeginLoad(Model& model, int64_t seq);
void EndLoad(Front& front, Model& model, int64_t seq,
             std::optional<uint64_t> last_step);

// retrieve_future and cancel_future.
[[nodiscard]] absl::Status RetrieveFuture(Front& front, const CallPtr& call,
                                          const Respond& respond);
[[nodiscard]] absl::Status CancelFuture(Front& front, const CallPtr& call,
                                        const Respond& respond);

// Forgets the requests of a model that is gone.
void EraseSteps(Front& front, const std::string& model);

// Has `run` do the requests of the ledger again, in their order.
void RestoreSteps(Front& front, const std::function<void(CallPtr)>& run);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_STEPS_H_
