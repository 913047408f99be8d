// Handles forward_backward, forward and optim_step. Each request is a step of a
// model (PromiseStep). If a body parses but its data are bad, the request
// succeeds and the step's future fails.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_TRAINING_H_
#define WEFT_SERVER_TINKER_TRAINING_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/tinker/front.h"
#include "weft/v1/training.pb.h"

namespace weft::tinker {

// The body of forward_backward or forward.
struct TrainBody {
  std::string model;
  int64_t seq = 0;
  bool forward_only = false;
  // The request for the engine. Its error fails the future, not the request,
  // because the step must still use its sequence number.
  absl::StatusOr<v1::ForwardBackwardRequest> request;
  std::string loss_id;  // Of the uploaded loss that it asks for, or "".
  // Covers `request` while it is made. If there was no room, it is an error,
  // and so is `request`.
  absl::StatusOr<std::shared_ptr<void>> charge;
};

// Parses and translates the body for RunForwardBackward: large data take long.
// Threads: any.
[[nodiscard]] absl::Status ReadTrain(const Front& front, Call* call);
[[nodiscard]] absl::Status RunForwardBackward(Front& front, const CallPtr& call,
                                              const Respond& respond);
[[nodiscard]] absl::Status RunOptimStep(Front& front, const CallPtr& call,
                                        const Respond& respond);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_TRAINING_H_
