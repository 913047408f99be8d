// Accepts or refuses steps, answers repeated calls of steps, and completes
// steps.
#ifndef WEFT_SRC_DISPATCH_STEP_DESK_H_
#define WEFT_SRC_DISPATCH_STEP_DESK_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/statusor.h"
#include "src/dispatch/state.h"

namespace weft::dispatch {

class StepDesk {
 public:
  explicit StepDesk(State* state) : s_(*state) {}

  // Any thread may call the method below.

  // Queues a new step. A repeated call of a step in flight waits for that
  // step's result. A repeated call of a completed step gets the stored result.
  // Submit sets id, adapter, step, deadline and `recorded` of `item`. `done`
  // runs on the reply thread, or before this method returns if the step is
  // refused. Errors of a refusal: those of ReplayTable::Lookup and
  // Scheduler::Enqueue, NOT_FOUND, FAILED_PRECONDITION (an epoch that has
  // ended), RESOURCE_EXHAUSTED (no room to record the step), or UNAVAILABLE
  // while draining.
  CancelHandle Submit(StepRequest request, sched::WorkItem item,
                      StepCallback done);

  // The engine thread calls the methods below.

  // Ends the step. The result goes to all callers that wait for it and to the
  // replay table. An error for which IsStepFailure returns true becomes a
  // StepFailure, which is a result. After any other error a caller may send the
  // step again. `facts` are the adapter's facts after the step. A client that
  // sees the step as done also sees these facts.
  void Complete(uint64_t id, absl::StatusOr<StepResult> result,
                const std::optional<AdapterFacts>& facts = std::nullopt);
  // Call it after a slice that is not the request's last. If all callers have
  // cancelled the request, ends it and returns false; otherwise returns true.
  [[nodiscard]] bool FinishSlice(uint64_t id);
  // Ends a load after which the adapter has the state of step `last_step`. A
  // new epoch begins. Its number is facts.info.epoch, or a new number if
  // facts.info.epoch is 0. Completed steps leave the replay table. Waiting work
  // whose step number the scheduler chose gets a new number. Other waiting work
  // fails if its step number is at most `last_step`.
  void CompleteLoad(const StepTask& load, uint64_t last_step,
                    const AdapterFacts& facts);
  // Counts the micro-batch's tokens for each tenant and adapter.
  void CountTokens(const RunTrain& train);

 private:
  // Any thread may call the methods below.

  [[nodiscard]] absl::StatusOr<CancelHandle> Accept(StepRequest& request,
                                                    sched::WorkItem item,
                                                    std::string digest,
                                                    const StepCallback& done);
  // If the call repeats a completed step, posts the stored result to `done`. If
  // the call repeats a step in flight, `done` waits for that step. Returns none
  // if the call is new.
  [[nodiscard]] absl::StatusOr<std::optional<CancelHandle>> Repeated(
      AdapterRecord& record, const StepRequest& request,
      const std::string& digest, const StepCallback& done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  void Cancel(uint64_t id, uint64_t waiter_id);
  // Posts CANCELLED to a caller. Its step may go on for other callers.
  void AnswerCancelled(StepCallback done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  using StepNode = decltype(State::steps)::node_type;

  // The engine thread calls the methods below.

  // Ends the step and answers its callers. Returns the step's entry, which the
  // caller destroys after it has released the lock.
  StepNode End(uint64_t id, absl::StatusOr<StepResultPtr> result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Raises the adapter's durable_step to `step`. Does nothing if `epoch` has
  // ended. Threads: reply thread.
  void NoteDurable(AdapterKey adapter, uint64_t epoch, uint64_t step)
      ABSL_LOCKS_EXCLUDED(s_.mu);
  // Gives the result to all callers that wait for the step.
  void Answer(StepWork& work, absl::StatusOr<StepResultPtr> result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // Renumbers or fails waiting work, as CompleteLoad says. Then empties the
  // replay table and adds the work that is left to the table.
  void RestartNumbers(const StepTask& load, uint64_t last_step,
                      AdapterRecord& record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);

  State& s_;
};

// Adapts `done` for Submit. `done` gets the alternative of StepResult that it
// expects, the status of a StepFailure, or the error.
template <typename Result>
[[nodiscard]] StepCallback TypedReply(Callback<StepReply<Result>> done) {
  return [done = std::move(done)](absl::StatusOr<StepResultPtr> result,
                                  bool replayed) {
    if (!result.ok()) {
      done(result.status());
      return;
    }
    if (const auto* failure = std::get_if<StepFailure>(result->get())) {
      absl::Status status = failure->status;
      status.SetPayload(kStepDonePayload, {});
      if (replayed) status.SetPayload(kReplayedPayload, {});
      done(status);
      return;
    }
    done(StepReply<Result>{.result = std::get<Result>(**result),
                           .replayed = replayed});
  };
}

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_STEP_DESK_H_
