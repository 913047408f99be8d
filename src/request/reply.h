// The callback that answers a request, and the handle that cancels it.
#ifndef WEFT_SRC_REQUEST_REPLY_H_
#define WEFT_SRC_REQUEST_REPLY_H_

#include <functional>
#include <utility>

#include "absl/status/statusor.h"

namespace weft {

// Gets the result of a request, exactly once. A callback must not block,
// because other callbacks wait for the same thread.
template <typename T>
using Callback = std::function<void(absl::StatusOr<T>)>;

// Cancels a request. The request's callback still runs, with CANCELLED if the
// cancellation came in time. A default-constructed handle does nothing.
// Threads: any, while the engine exists.
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

// The URL of a payload of an error status. A status with this payload means
// that the step is completed and keeps its number (StepFailure). The payload's
// content does not matter.
inline constexpr char kStepDonePayload[] = "weft/step-done";
// The URL of another payload. A status with this payload is the result of an
// earlier, equal call.
inline constexpr char kReplayedPayload[] = "weft/replayed";

// A result, and whether it is the result of an earlier, equal call.
template <typename T>
struct StepReply {
  T result;
  bool replayed = false;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_REPLY_H_
