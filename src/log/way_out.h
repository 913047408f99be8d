// Says in an error what the operator can do.
#ifndef WEFT_SRC_LOG_WAY_OUT_H_
#define WEFT_SRC_LOG_WAY_OUT_H_

#include "absl/status/status.h"
#include "src/base/options/options.h"

namespace weft::log {

// Adds to the error of a damaged state how to go on from a backup. Returns any
// other status as it is.
absl::Status WithWayOut(const absl::Status& status,
                        const EngineOptions& options);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_WAY_OUT_H_
