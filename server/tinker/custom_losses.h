// Keeps the custom losses that clients upload, each under an id that steps of
// the same session name. A step gets a copy of the loss, so it does not need
// the loss again when it is replayed.
// Threads: the front's.
#ifndef WEFT_SERVER_TINKER_CUSTOM_LOSSES_H_
#define WEFT_SERVER_TINKER_CUSTOM_LOSSES_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "server/tinker/front.h"
#include "weft/v1/training.pb.h"

namespace weft::tinker {

// The most custom losses of a session.
inline constexpr size_t kMaxLosses = 64;

// Handles create_custom_loss: promises {"loss_id"}, the session's id and the
// number custom_loss_seq_id. A request that comes again gets the same id. The
// future fails with INVALID_ARGUMENT, which names the node, for a graph that
// cannot run; with ALREADY_EXISTS if the number has another loss.
[[nodiscard]] absl::Status CreateCustomLoss(Front& front, const CallPtr& call,
                                            const Respond& respond);

// Puts the caller's loss into a step, and drops the inputs that the loss does
// not read. Errors: NOT_FOUND if there is no such loss, or its session ended.
[[nodiscard]] absl::Status SetCustomLoss(Front& front, const Call& call,
                                         const std::string& id,
                                         v1::ForwardBackwardRequest* step);

void DropLossesOf(Front& front, const std::string& session);
// Reads the losses of the restored sessions from the ledger.
void RestoreLosses(Front& front);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_CUSTOM_LOSSES_H_
