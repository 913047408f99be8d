// Ranks that must come to the same conclusion.
#ifndef WEFT_SRC_PARALLEL_AGREEMENT_H_
#define WEFT_SRC_PARALLEL_AGREEMENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "src/parallel/communicator.h"

namespace weft::parallel {

// All ranks of a group on the host call these two functions together. They
// throw what the group does.

// OK when `own` is so on every rank. Otherwise every rank gets the error of the
// first one that has any: its code, and of its message the first kilobyte,
// after "rank N: ".
[[nodiscard]] absl::Status Agree(Communicator& group, const absl::Status& own);

// The smallest of all ranks' numbers.
[[nodiscard]] int64_t Smallest(Communicator& group, int64_t own);

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_AGREEMENT_H_
