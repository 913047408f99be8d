// Converts requests to save or load a checkpoint, and descriptions of
// checkpoints, to and from messages of log.proto. Private to src/log.
#ifndef WEFT_SRC_LOG_CHECKPOINT_VALUES_H_
#define WEFT_SRC_LOG_CHECKPOINT_VALUES_H_

#include "src/log/log.pb.h"
#include "src/request/checkpoint.h"

namespace weft::records {

void Put(const SaveCheckpointRequest& request, log::Request* out);
void Put(const LoadCheckpointRequest& request, log::Request* out);
void Put(const CheckpointInfo& info, log::Result* out);

// The requests that Get returns have no adapter_id and no step. log::Request
// has these two for every kind of request, and values.cc reads them.
[[nodiscard]] SaveCheckpointRequest Get(const log::Save& in);
[[nodiscard]] LoadCheckpointRequest Get(const log::Load& in);
[[nodiscard]] CheckpointInfo Get(const log::CheckpointResult& in);

}  // namespace weft::records

#endif  // WEFT_SRC_LOG_CHECKPOINT_VALUES_H_
