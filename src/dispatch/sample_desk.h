// Accepts samples, hands them to the decode loop when it has room, and delivers
// their tokens.
#ifndef WEFT_SRC_DISPATCH_SAMPLE_DESK_H_
#define WEFT_SRC_DISPATCH_SAMPLE_DESK_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "src/dispatch/state.h"

namespace weft::dispatch {

class SampleDesk {
 public:
  explicit SampleDesk(State* state) : s_(*state) {}

  // Any thread may call the method below.

  // Queues a request. `on_delta` may be empty. Both callbacks run on the reply
  // thread. But if the request is refused, `done` runs before this method
  // returns. Errors of a refusal: NOT_FOUND, UNAVAILABLE while draining, and
  // those of Scheduler::Enqueue.
  CancelHandle Submit(SampleRequest request,
                      std::function<void(SampleDelta)> on_delta,
                      Callback<SampleResult> done);

  // Does what Submit does, but samples from `key`, whatever adapter the request
  // names. A sample that came before a drain may be submitted in it.
  CancelHandle SubmitTo(AdapterKey key, bool before_drain,
                        SampleRequest request,
                        std::function<void(SampleDelta)> on_delta,
                        Callback<SampleResult> done);

  // The engine thread calls the methods below.

  // Returns the sample whose turn it is, if there is one. Passes over the
  // tenants `without`. The caller then calls PutBack, Start or Finish.
  std::optional<SampleTask> Take(const std::set<std::string>& without = {});
  // Puts the sample of the latest Take back at its old place in the queue. Call
  // it if the decode loop has no room for the sample.
  void PutBack(const SampleTask& sample);
  // Notes that the sample is now in prefill or decode.
  void Start(const SampleTask& sample);
  // Ends the sample and gives `result` to its caller.
  void Finish(uint64_t id, absl::StatusOr<SampleResult> result);

  // Passes `deltas`, the tokens drawn since the last call, to the request's
  // `on_delta`. REQUIRES: the request streams, or `deltas` is empty.
  void Deliver(uint64_t id, std::vector<SampleDelta> deltas);

 private:
  // Any thread may call the methods below.

  // The request is for `key`; without one, for the adapter that it names.
  CancelHandle SubmitAs(std::optional<AdapterKey> key, bool before_drain,
                        SampleRequest request,
                        std::function<void(SampleDelta)> on_delta,
                        const Callback<SampleResult>& done);
  absl::StatusOr<uint64_t> Accept(std::optional<AdapterKey> key,
                                  bool before_drain, SampleRequest& request,
                                  std::function<void(SampleDelta)> on_delta,
                                  const Callback<SampleResult>& done);
  void Cancel(uint64_t id);

  State& s_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_SAMPLE_DESK_H_
