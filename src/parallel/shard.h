// Divides items among the ranks of a group.
#ifndef WEFT_SRC_PARALLEL_SHARD_H_
#define WEFT_SRC_PARALLEL_SHARD_H_

#include <cstdint>

namespace weft::parallel {

// The half-open interval [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

// One of the `size` ranks of a group.
struct Shard {
  int rank = 0;
  int size = 1;
  // Returns this rank's part of `count` items. Parts are contiguous, in the
  // order of ranks, and their sizes differ by at most one.
  Range Of(int64_t count) const {
    return {.begin = count * rank / size, .end = count * (rank + 1) / size};
  }
};

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_SHARD_H_
