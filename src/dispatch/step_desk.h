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
  // UNAVAILABLE when draining.
  CancelHandle Submit(StepRequest request, sched::WorkItem item,
                      StepCallback done);

  // Engine thread.

  // Ends the step: its result goes to all who wait for it and to the replay
  // table, or its number is free again.
  // `facts`: what the step has made of its adapter, shown with the number.
  void Complete(uint64_t id, absl::StatusOr<StepResult> result,
                const std::optional<AdapterFacts>& facts = std::nullopt);
  // After a slice that is not the request's last one. False: its caller
  // cancelled it and it has ended.
  [[nodiscard]] bool FinishSlice(uint64_t id);
  // The running step has replaced its adapter's state by one of `last_step`:
  // numbers go on from there, for the work that waits and for the replay table.
  void RestartNumbers(const StepTask& running, uint64_t last_step,
                      const AdapterFacts& facts);
  // The micro-batch has been run for its tenants.
  void CountTokens(const RunTrain& train);

 private:
  [[nodiscard]] absl::StatusOr<CancelHandle> Accept(StepRequest& request,
                                                    sched::WorkItem item,
                                                    std::string digest,
                                                    const StepCallback& done);
  void Cancel(uint64_t id, uint64_t waiter_id);
  using StepNode = decltype(State::steps)::node_type;
  // Returns what is to be freed without the lock.
  StepNode End(uint64_t id, absl::StatusOr<StepResultPtr> result)
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
    done(StepReply<Result>{.result = std::get<Result>(**result),
                           .replayed = replayed});
  };
}

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_STEP_DESK_H_
