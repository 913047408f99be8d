// The body of a training request, and the custom losses that clients upload,
// each under an id that steps of the same session name. A step gets a copy of
// the loss, so it does not need the loss again when it is replayed.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_TRAINING_H_
#define WEFT_SERVER_TINKER_TRAINING_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/tinker/front.h"
#include "weft/v1/training.pb.h"

namespace weft::server::tinker {

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

// The most custom losses of a session.
inline constexpr size_t kMaxLosses = 64;

void DropLossesOf(Front& front, const std::string& session);

// Reads the losses of the restored sessions from the ledger.
void RestoreLosses(Front& front, const std::string& session = "");

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_TRAINING_H_
