#include "src/executor/decode_buckets.h"

#include <algorithm>

namespace weft::executor {
namespace {

// Bucket sizes double up to this size.
constexpr int64_t kLastDoubled = 16;
constexpr int64_t kLeastTokens = 512;

int64_t NextBucket(int64_t bucket) {
  if (bucket < kLastDoubled) return 2 * bucket;
  // Above kLastDoubled, sizes alternate between 2^n and 3 * 2^(n - 1).
  return (bucket & (bucket - 1)) == 0 ? bucket / 2 * 3 : bucket / 3 * 4;
}

}  // namespace

int64_t RowBucket(int64_t num_rows, int64_t max_rows) {
  int64_t bucket = 1;
  while (bucket < num_rows) bucket = NextBucket(bucket);
  return std::min(bucket, max_rows);
}

int64_t TokenBound(int64_t num_tokens) {
  int64_t bound = kLeastTokens;
  while (bound < num_tokens) bound *= 4;
  return bound;
}

}  // namespace weft::executor
