// Samples: accepted here, taken by the decode loop as it has room, answered
// piece by piece.
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

  // Queues a request. `on_delta` may be empty; it and `done` run where replies
  // are sent or, when the request is refused, before this returns.
  // Errors: NOT_FOUND, UNAVAILABLE when draining, those of Scheduler::Enqueue.
  CancelHandle Submit(SampleRequest request,
                      std::function<void(SampleDelta)> on_delta,
                      Callback<SampleResult> done);

  // Engine thread.

  // The sample whose turn it is. Follow it by one of the next three.
  [[nodiscard]] std::optional<SampleTask> Take();
  // There is no room for it: back to its old place.
  void PutBack(const SampleTask& sample);
  // It is being prefilled or decoded.
  void Start(const SampleTask& sample);
  // Ends it.
  void Finish(uint64_t id, absl::StatusOr<SampleResult> result);

  // Tokens drawn since the last call, for a request that streams.
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
