// Reads one training sequence of a request; see request_validation.h.
#ifndef WEFT_SERVER_WIRE_DATUM_READER_H_
#define WEFT_SERVER_WIRE_DATUM_READER_H_

#include "absl/status/statusor.h"
#include "server/wire/request_validation.h"
#include "src/request/train.h"
#include "weft/v1/training.pb.h"

namespace weft::server {

// Converts and checks `datum`, which is data[index] of a request with the loss
// `function`. Errors: INVALID_ARGUMENT, with a message that starts with
// "data[<index>].".
absl::StatusOr<Datum> ReadDatum(const v1::Datum& datum, int index,
                                LossFunction function,
                                const RequestLimits& limits);

}  // namespace weft::server

#endif  // WEFT_SERVER_WIRE_DATUM_READER_H_
