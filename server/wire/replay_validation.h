// Reads which values of a training request come from records of samples
// (src/request/sample_record.h); see request_validation.h.
#ifndef WEFT_SERVER_WIRE_REPLAY_VALIDATION_H_
#define WEFT_SERVER_WIRE_REPLAY_VALIDATION_H_

#include "absl/status/status.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "server/wire/request_validation.h"
#include "src/request/train.h"
#include "weft/v1/training.pb.h"

namespace weft::server {

// Fills out->replay. `out` has the data of `data` and the loss already. Error:
// INVALID_ARGUMENT.
absl::Status ReadReplay(
    const google::protobuf::RepeatedPtrField<v1::Datum>& data,
    const v1::LossConfig& loss, const RequestLimits& limits, TrainRequest* out);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_REPLAY_VALIDATION_H_
