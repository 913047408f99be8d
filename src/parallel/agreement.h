// Functions by which all ranks get the same result.
#ifndef WEFT_SRC_PARALLEL_AGREEMENT_H_
#define WEFT_SRC_PARALLEL_AGREEMENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "src/parallel/communicator.h"

namespace weft::parallel {

// All ranks of a group on the host call these two functions together. They
// throw what the group throws.

// Returns OK if `own` is OK on every rank. Otherwise every rank gets the error
// of the first rank that has one: its code, and "rank N: " with the first
// kilobyte of its message.
[[nodiscard]] absl::Status Agree(Communicator& group, const absl::Status& own);

// Returns the smallest of all ranks' numbers.
[[nodiscard]] int64_t Smallest(Communicator& group, int64_t own);

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_AGREEMENT_H_
