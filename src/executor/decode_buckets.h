// The sizes that decode steps are captured in. A CUDA graph has fixed sizes, so
// a batch runs in the graph of the next larger one, whose further rows are
// padding. Torch-free.
#ifndef WEFT_SRC_EXECUTOR_DECODE_BUCKETS_H_
#define WEFT_SRC_EXECUTOR_DECODE_BUCKETS_H_

#include <cstdint>

namespace weft::executor {

// The smallest of 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... that takes so many
// rows, but at most max_rows: beyond 16 rows less than a third of them is
// padding. 1 <= num_rows <= max_rows.
[[nodiscard]] int64_t RowBucket(int64_t num_rows, int64_t max_rows);

// The bound on a sequence's tokens that a graph is captured for, at least
// num_tokens: 512, 2048, 8192, ... What is launched depends on the bound, and
// few bounds make few graphs.
[[nodiscard]] int64_t TokenBound(int64_t num_tokens);

}  // namespace weft::executor

#endif  // WEFT_SRC_EXECUTOR_DECODE_BUCKETS_H_
