// The memory that the requests of steps and samples take.
#ifndef WEFT_SRC_REQUEST_REQUEST_BYTES_H_
#define WEFT_SRC_REQUEST_REQUEST_BYTES_H_

#include <cstdint>

#include "src/request/sample.h"
#include "src/request/step.h"

namespace weft {

// Return at most how many bytes of memory the request takes from its arrival to
// its end: all that it carries, with the capacity of its lists, and what the
// dispatcher notes of it.
int64_t NumBytes(const TrainRequest& request);
int64_t NumBytes(const OptimStepRequest& request);
int64_t NumBytes(const SaveCheckpointRequest& request);
int64_t NumBytes(const LoadCheckpointRequest& request);
int64_t NumBytes(const PublishSnapshotRequest& request);
int64_t NumBytes(const RefusedStep& request);
int64_t NumBytes(const SampleRequest& request);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_REQUEST_BYTES_H_
