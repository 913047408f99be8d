// Splits things over the ranks that share a layer. Torch-free.
#ifndef WEFT_SRC_PARALLEL_SHARD_H_
#define WEFT_SRC_PARALLEL_SHARD_H_

#include <cstdint>

namespace weft::parallel {

// [begin, end).
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  [[nodiscard]] int64_t size() const { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

// One of `size` ranks that split every layer between them.
struct Shard {
  int rank = 0;
  int size = 1;
  // Returns its part of `count` things. Parts are contiguous, in the order of
  // ranks, and differ by at most one.
  [[nodiscard]] Range Of(int64_t count) const {
    return {.begin = count * rank / size, .end = count * (rank + 1) / size};
  }
};

}  // namespace weft::parallel

#endif  // WEFT_SRC_PARALLEL_SHARD_H_
