#include "src/group/decode_buckets.h"

#include <algorithm>

namespace weft::group {
namespace {

// A bucket up to which sizes double.
constexpr int64_t kLastDoubled = 16;
constexpr int64_t kLeastTokens = 512;

constexpr int64_t kFloatBytes = 4;
// Handles of cuBLAS with their workspaces, once for the stream of captures.
constexpr int64_t kLibraryBytes = int64_t{64} << 20;
// A kernel's node in a graph that is ready to run, with its arguments.
constexpr int64_t kNodeBytes = 8 << 10;
constexpr int64_t kLaunchesPerLayer = 16;
// Parts of attention that a device runs at a time, each with a sum of its own.
constexpr int64_t kAttentionParts = 2048;
// The allocator rounds what it asks the device for up to this.
constexpr int64_t kSegmentBytes = int64_t{20} << 20;

int64_t NextBucket(int64_t bucket) {
  if (bucket < kLastDoubled) return 2 * bucket;
  // Of 2^n and 3 * 2^(n - 1) in turn.
  return (bucket & (bucket - 1)) == 0 ? bucket / 2 * 3 : bucket / 3 * 4;
}

// One step's tensors as if all of a layer's were alive together.
int64_t ActivationBytes(const model::ModelConfig& config, int64_t element_bytes,
                        int max_rank, int64_t rows) {
  const lora::ModelShape shape = config.shape();
  const int64_t layer = 6 * shape.hidden + 2 * shape.q_width +
                        2 * shape.kv_width + 3 * shape.ffn + 3 * max_rank;
  // With the copy of a head that computes in another dtype.
  const int64_t head = 2 * shape.vocab * kFloatBytes;
  const int64_t parts = std::max<int64_t>(
      kAttentionParts, int64_t{2} * rows * config.num_kv_heads);
  const int64_t part = int64_t{config.num_heads} / config.num_kv_heads *
                       (config.head_dim + 2) * kFloatBytes;
  return rows * (layer * element_bytes + head) + parts * part;
}

}  // namespace

std::vector<int64_t> RowBuckets(int64_t max_rows) {
  std::vector<int64_t> buckets;
  for (int64_t rows = 1; rows < max_rows; rows = NextBucket(rows)) {
    buckets.push_back(rows);
  }
  buckets.push_back(max_rows);
  return buckets;
}

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

int64_t DecodeGraphBytes(const model::ModelConfig& config,
                         int64_t element_bytes, int max_rank,
                         int64_t max_rows) {
  const int64_t graph = config.num_layers * kLaunchesPerLayer * kNodeBytes;
  int64_t bytes = kLibraryBytes;
  for (const int64_t rows : RowBuckets(max_rows)) {
    // A graph uses the memory of the others again. In the worst order each is
    // larger than those before, and its large tensors fit in none of theirs.
    bytes += ActivationBytes(config, element_bytes, max_rank, rows) + graph;
  }
  return bytes + kSegmentBytes;
}

}  // namespace weft::group
