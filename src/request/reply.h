// What a caller hands in to be answered, and what it gets to cancel with.
#ifndef WEFT_SRC_REQUEST_REPLY_H_
#define WEFT_SRC_REQUEST_REPLY_H_

#include <functional>
#include <utility>

#include "absl/status/statusor.h"

namespace weft {

// Runs exactly once. Must not block: others wait for the thread that runs it.
template <typename T>
using Callback = std::function<void(absl::StatusOr<T>)>;

// Lets the caller cancel work that has not run yet: safe to call from any
// thread while the engine lives; the request's callback still runs, with
// CANCELLED when the cancellation came in time. A default-made handle does
// nothing.
class CancelHandle {
 public:
  CancelHandle() = default;
  explicit CancelHandle(std::function<void()> cancel)
      : cancel_(std::move(cancel)) {}
  void Cancel() const {
    if (cancel_) cancel_();
  }

 private:
  std::function<void()> cancel_;
};

// Payloads of a status that a step ends with. Their values mean nothing.
// The step is done and keeps its number (StepFailure).
inline constexpr char kStepDonePayload[] = "weft/step-done";
// The status was stored from an earlier, equal call.
inline constexpr char kReplayedPayload[] = "weft/replayed";

// A result, and whether it was stored from an earlier, equal call.
template <typename T>
struct StepReply {
  T result;
  bool replayed = false;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_REPLY_H_
