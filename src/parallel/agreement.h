// Functions that give all ranks the same result.
#ifndef WEFT_SRC_PARALLEL_AGREEMENT_H_
#define WEFT_SRC_PARALLEL_AGREEMENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "src/parallel/communicator.h"

namespace weft::parallel {

// All ranks of `group` call these functions together. `group` must be a group
// for tensors on the CPU. The functions throw what the operations of
// Communicator throw.

// Returns OK if `own` is OK on every rank. Otherwise every rank gets the error
// of the lowest rank that has an error. The message is "rank N: " and the first
// kilobyte of that rank's message.
[[nodiscard]] absl::Status Agree(Communicator& group, const absl::Status& own);

// Returns the smallest of all ranks' `own`.
[[nodiscard]] int64_t Smallest(Communicator& group, int64_t own);

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_AGREEMENT_H_
