// Accepts samples, gives them to the decode loop when it has room, and answers
// them piece by piece.
#ifndef WEFT_SRC_DISPATCH_SAMPLE_DESK_H_
#define WEFT_SRC_DISPATCH_SAMPLE_DESK_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "src/dispatch/state.h"

namespace weft::dispatch {

class SampleDesk {
 public:
  explicit SampleDesk(State* state) : s_(*state) {}

  // Any thread.

  // Queues a request. `on_delta` may be empty. Both callbacks run on the thread
  // that sends replies. If the request is refused, `done` runs before this
  // returns.
  // Errors: NOT_FOUND, UNAVAILABLE when draining, those of Scheduler::Enqueue.
  CancelHandle Submit(SampleRequest request,
                      std::function<void(SampleDelta)> on_delta,
                      Callback<SampleResult> done);

  // Engine thread.

  // Returns the sample whose turn it is. The caller then calls PutBack, Start
  // or Finish.
  [[nodiscard]] std::optional<SampleTask> Take();
  // There is no room for the sample. Puts it back at its old place in the
  // queue.
  void PutBack(const SampleTask& sample);
  // The sample is now prefilled or decoded.
  void Start(const SampleTask& sample);
  // Ends the sample.
  void Finish(uint64_t id, absl::StatusOr<SampleResult> result);

  // Delivers the tokens drawn since the last call, for a request that streams.
  void Deliver(uint64_t id, std::vector<SampleDelta> deltas);

 private:
  [[nodiscard]] absl::StatusOr<uint64_t> Accept(
      SampleRequest& request, std::function<void(SampleDelta)> on_delta,
      const Callback<SampleResult>& done);
  void Cancel(uint64_t id);

  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_SAMPLE_DESK_H_
