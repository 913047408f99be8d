// Reads the custom loss of a training request and its inputs; see
// request_validation.h.
// Errors: INVALID_ARGUMENT, which names the field.
// Threads: any.
#ifndef WEFT_SERVER_WIRE_CUSTOM_LOSS_READER_H_
#define WEFT_SERVER_WIRE_CUSTOM_LOSS_READER_H_

#include "absl/status/status.h"
#include "src/request/train.h"
#include "weft/v1/training.pb.h"

namespace weft::server {

// Reads `in.custom_loss` for the function that `out` has and a request of
// `num_data` sequences. Errors: also those of ReadLossGraph; if the function is
// not custom but there is a custom loss; if the graph would run on so many
// sequences that it could hold the engine for seconds.
absl::Status ReadCustomLoss(const v1::LossConfig& in, int num_data,
                            LossConfig* out);

// Reads the inputs of data[index] for the loss `config`.
absl::Status ReadCustomInputs(const v1::Datum& in, int index,
                              const LossConfig& config, Datum* out);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_CUSTOM_LOSS_READER_H_
