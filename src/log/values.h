// Converts requests, results and adapters' configs to and from messages of
// log.proto. Private to src/log.
#ifndef WEFT_SRC_LOG_VALUES_H_
#define WEFT_SRC_LOG_VALUES_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/log/log.pb.h"
#include "src/request/step.h"

namespace weft::records {

void ToProto(const LoraConfig& config, log::Config* out);
void ToProto(const StepRequest& request, log::Request* out);
void ToProto(const StepResult& result, log::Result* out);

[[nodiscard]] LoraConfig FromProto(const log::Config& config);
// Errors: DATA_LOSS for an unknown kind.
[[nodiscard]] absl::StatusOr<StepRequest> FromProto(const log::Request& in);
[[nodiscard]] absl::StatusOr<StepResult> FromProto(const log::Result& in);

}  // namespace weft::records

#endif  // WEFT_SRC_LOG_VALUES_H_
