// forward_backward between Tinker's messages and Weft's.
// Errors: INVALID_ARGUMENT naming the field; UNIMPLEMENTED for what Weft does
// not offer. What the engine cannot take (ids, lengths, values) is found by
// server/request_validation.h afterwards.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_TRAIN_WIRE_H_
#define WEFT_SERVER_TINKER_TRAIN_WIRE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/tinker/fields.h"
#include "server/tinker/wire.pb.h"
#include "src/request/train.h"
#include "weft/v1/training.pb.h"

namespace weft::tinker {

// The JSON form of the message: {"forward_backward_input": {"data", "loss_fn",
// "loss_fn_config"}, "model_id", "seq_id"}, or "forward_input".
[[nodiscard]] absl::StatusOr<ForwardBackwardRequest> TrainFromJson(
    const Json& body);

// Targets per token of each datum, as its target_tokens have them; 0: the
// tensor has one dimension.
using TargetShapes = std::vector<int64_t>;

struct TranslatedTrain {
  v1::ForwardBackwardRequest request;  // Without adapter and step.
  TargetShapes shapes;
};
[[nodiscard]] absl::StatusOr<TranslatedTrain> TranslateTrain(
    const ForwardBackwardRequest& in);

// A serialized ForwardBackwardOutput: `logprobs` and `elementwise_loss` of each
// datum in the shape of its targets, and the metrics.
[[nodiscard]] std::string TrainOutput(const TrainResult& result,
                                      const TargetShapes& shapes);
// The same as JSON text.
[[nodiscard]] std::string TrainOutputJson(const std::string& serialized);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_TRAIN_WIRE_H_
