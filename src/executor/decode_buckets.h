// The sizes for which decode steps are captured as CUDA graphs. A graph has
// fixed sizes, so a batch runs in the smallest graph that holds it, and the
// rows that the batch does not fill are padding. Torch-free.
#ifndef WEFT_SRC_EXECUTOR_DECODE_BUCKETS_H_
#define WEFT_SRC_EXECUTOR_DECODE_BUCKETS_H_

#include <cstdint>

namespace weft::executor {

// Returns the smallest of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... that is at
// least `num_rows`, or `max_rows` if that is smaller. Beyond 16 rows, less than
// a third of the rows is padding. REQUIRES: 1 <= num_rows <= max_rows.
[[nodiscard]] int64_t RowBucket(int64_t num_rows, int64_t max_rows);

// Returns the smallest of 512, 2048, 8192, ... that is at least `num_tokens`.
// Each graph is recorded for one such bound on the tokens per sequence, so few
// bounds mean few graphs.
[[nodiscard]] int64_t TokenBound(int64_t num_tokens);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_BUCKETS_H_
