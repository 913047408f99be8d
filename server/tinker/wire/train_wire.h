// Converts requests and results of forward_backward between Tinker's messages
// and Weft's.
// Errors: INVALID_ARGUMENT, which names the field; UNIMPLEMENTED for what Weft
// does not offer. server/wire/request_validation.h finds bad ids, lengths and
// values later.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_WIRE_TRAIN_WIRE_H_
#define WEFT_SERVER_TINKER_WIRE_TRAIN_WIRE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/tinker/wire.pb.h"
#include "server/tinker/wire/fields.h"
#include "src/request/train.h"
#include "weft/v1/training.pb.h"

namespace weft::server::tinker {

// Reads the JSON form of the request: {"forward_backward_input": {"data",
// "loss_fn", "loss_fn_config"}, "model_id", "seq_id"}. If the body has
// "forward_input" in place of "forward_backward_input", the request computes no
// gradients.
absl::StatusOr<ForwardBackwardRequest> TrainFromJson(const Json& body);

// Returns the id of the uploaded loss that the request asks for, or "" if its
// loss_fn is not custom. Errors: INVALID_ARGUMENT unless loss_fn_config has
// loss_id alone.
absl::StatusOr<std::string> LossIdOf(const ForwardBackwardRequest& in);

// Returns at most how many bytes of memory TranslateTrain takes, for its result
// and on the way there. Sparse tensors take their dense size.
int64_t TranslationBytes(const ForwardBackwardRequest& in);
// Converts a request. The adapter and the step of the result are not set, and
// neither is loss.replay_routing. The other two switches of records are set if
// data have the provenance of sampled targets. For a custom loss, the graph is
// not set either, and the data have all inputs, also those that the graph does
// not read.
// Refuses sparse tensors that claim more than kMaxDenseValues together.
absl::StatusOr<v1::ForwardBackwardRequest> TranslateTrain(
    const ForwardBackwardRequest& in);

// Returns a serialized ForwardBackwardOutput. It holds the metrics and, for
// each datum, `logprobs` and `elementwise_loss` in the shape of the datum's
// targets.
std::string TrainOutput(const TrainResult& result);
// Converts the result of TrainOutput to JSON text.
std::string TrainOutputJson(const std::string& serialized);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_WIRE_TRAIN_WIRE_H_
