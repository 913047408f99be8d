// Accepts or refuses steps, answers repeated calls of steps, and completes
// steps.
#ifndef WEFT_SRC_DISPATCH_STEP_DESK_H_
#define WEFT_SRC_DISPATCH_STEP_DESK_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "src/dispatch/state.h"

namespace weft::dispatch {

// How to keep a step. `record` records it under its id and the key of its
// adapter, unless the log does not have this adapter.
struct Keeping {
  KeepStep step;
  std::function<void(uint64_t work, AdapterKey key)> record = nullptr;
};

class StepDesk {
 public:
  explicit StepDesk(State* state) : s_(*state) {}

  // Any thread may call the three methods below.

  // Queues a new step. A repeated call of a step in flight waits for that
  // step's result. A repeated call of a completed step gets the stored result.
  // Submit sets id, adapter, step, deadline and `recorded` of `item`. `done`
  // runs on the reply thread, or before this method returns if the step is
  // refused. Errors of a refusal: those of ReplayTable::Lookup and
  // Scheduler::Enqueue, NOT_FOUND, FAILED_PRECONDITION (the epoch of an earlier
  // adapter of this name), RESOURCE_EXHAUSTED (no room to record the step), or
  // UNAVAILABLE while draining, or if the request still has a `replay` and the
  // step that it repeats has ended without a result.
  CancelHandle Submit(StepRequest request, WorkItem item, StepCallback done,
                      Keeping keep = {});

  // Returns whether Submit would answer the call without running the request:
  // it repeats a step, or its number is wrong. `digest` is the request's.
  bool Knows(const std::string& adapter_id, uint64_t step,
             const std::string& digest) ABSL_LOCKS_EXCLUDED(s_.mu);

  // Gives `done` the result of a step, for which it waits if the step is in
  // flight. Errors: those of Engine::Retrieve.
  void Retrieve(const std::string& adapter_id, uint64_t step,
                Callback<StepResultPtr> done);

  // The engine thread calls the methods below.

  // Ends the step. The result (StoredResult) goes to all callers that wait for
  // it and to the replay table. `facts` are the adapter's facts after the step.
  // A client that sees the step as done also sees these facts. The result of a
  // load has last_step, the steps of the loaded state; the desk sets the rest.
  void Complete(uint64_t id, absl::StatusOr<StepResult> result,
                const std::optional<AdapterFacts>& facts = std::nullopt);
  // Call it after a slice of a request, or a part of an optimizer step, that is
  // not the last. Returns false if no caller waits for a request without a
  // number, which then ends with Complete.
  [[nodiscard]] bool FinishSlice(uint64_t id);
  // Gives slices of one adapter that did not run to the engine thread again,
  // without those whose steps are gone. Until then no other step of the adapter
  // runs.
  void RunLater(RunTrain train);
  // Charges the tenant of a TrainRequest for time of the running micro-batch
  // that the step takes besides its tokens.
  void ChargeTime(const StepTask& step, absl::Duration elapsed);
  // Counts the micro-batch's tokens for each tenant and adapter.
  void CountTokens(const RunTrain& train);

 private:
  // Any thread may call the methods below.

  absl::StatusOr<CancelHandle> Accept(StepRequest& request, WorkItem item,
                                      std::string digest,
                                      const StepCallback& done,
                                      const Keeping& keep);
  // If the call repeats a completed step, posts the stored result to `done`. If
  // the call repeats a step in flight, `done` waits for that step, and `kept`
  // is posted if it is kept. Returns none if the call is new.
  absl::StatusOr<std::optional<CancelHandle>> Repeated(
      AdapterRecord& record, const StepRequest& request,
      const std::string& digest, const StepCallback& done,
      const std::function<void()>& kept) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Returns whether a drain takes the step: a save that can run, because
  // operators save before they stop. A save without a number comes behind steps
  // that wait.
  bool IsTakenByDrain(const StepRequest& request,
                      std::optional<AdapterKey> key) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  void Cancel(uint64_t id, uint64_t waiter_id);
  using StepNode = decltype(State::steps)::node_type;

  // The engine thread calls the methods below.

  // Ends the step and answers its callers. Returns the step's entry, which the
  // caller destroys after it has released the lock.
  StepNode End(uint64_t id, absl::StatusOr<StepResultPtr> result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Raises the adapter's durable_step to `step`. Threads: reply thread.
  void NoteDurable(AdapterKey adapter, uint64_t step)
      ABSL_LOCKS_EXCLUDED(s_.mu);
  // Gives the result to all callers that wait for the step.
  void Answer(StepWork& work, absl::StatusOr<StepResultPtr> result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Ends the adapter's line at a step that has no result, because the server
  // stops. No later step may run, or a restarted server could not run this one.
  void StopLine(AdapterRecord& record, const StepWork& lost,
                const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Updates what the dispatcher knows of the adapter after a step's result.
  void NoteResult(AdapterRecord& record, const StepWork& work,
                  const StepResult& result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Takes the steps of a loaded state, and describes the adapter in `*info`.
  void NoteLoad(AdapterRecord& record, const StepWork& work, AdapterInfo* info)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);

  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_STEP_DESK_H_
