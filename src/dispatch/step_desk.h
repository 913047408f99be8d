// Where steps are accepted, joined, replayed or refused, and where they end.
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

  // Any thread.

  // Queues a new step. Repeating one that is under way waits for its result;
  // repeating one that is done gets its stored result. `item`: kind and cost;
  // the rest is filled in here. Refused, `done` runs before this returns;
  // otherwise where replies are sent.
  // Errors: those of ReplayTable::Lookup and Scheduler::Enqueue, NOT_FOUND,
  // FAILED_PRECONDITION (an epoch that has ended), UNAVAILABLE when draining.
  CancelHandle Submit(StepRequest request, sched::WorkItem item,
                      StepCallback done);

  // Engine thread.

  // Ends the step: its result, which may be a StepFailure, goes to all who wait
  // for it and to the replay table; after an error its number is free again.
  // `facts`: what the step has made of its adapter, shown with the number.
  void Complete(uint64_t id, absl::StatusOr<StepResult> result,
                const std::optional<AdapterFacts>& facts = std::nullopt);
  // After a slice that is not the request's last one. False: its caller
  // cancelled it and it has ended.
  [[nodiscard]] bool FinishSlice(uint64_t id);
  // Ends a load that has replaced its adapter's state by one of `last_step`. A
  // new epoch begins, that of the facts if they have one: numbers go on from
  // there, for the work that waits and for the replay table.
  void CompleteLoad(const StepTask& load, uint64_t last_step,
                    const AdapterFacts& facts);
  // The micro-batch has been run for its tenants.
  void CountTokens(const RunTrain& train);

 private:
  [[nodiscard]] absl::StatusOr<CancelHandle> Accept(StepRequest& request,
                                                    sched::WorkItem item,
                                                    std::string digest,
                                                    const StepCallback& done);
  // The stored answer or the step under way that the call repeats; none: it is
  // a new one.
  [[nodiscard]] absl::StatusOr<std::optional<CancelHandle>> Repeated(
      AdapterRecord& record, const StepRequest& request,
      const std::string& digest, const StepCallback& done)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  void Cancel(uint64_t id, uint64_t waiter_id);
  using StepNode = decltype(State::steps)::node_type;
  // Returns what is to be freed without the lock.
  StepNode End(uint64_t id, absl::StatusOr<StepResultPtr> result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  void NoteDurable(AdapterKey adapter, uint64_t epoch, uint64_t step)
      ABSL_LOCKS_EXCLUDED(s_.mu);
  // Gives the result to all who wait for the step.
  void Answer(StepWork& work, absl::StatusOr<StepResultPtr> result)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);
  // For the work that waits behind the load, and for the replay table.
  void RestartNumbers(const StepTask& load, uint64_t last_step,
                      AdapterRecord& record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(s_.mu);

  State& s_;
};

// For Submit: gives `done` the alternative that its kind of step has.
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
