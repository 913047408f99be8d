// The sampler's search in order of logit: a radix select over histograms of
// tokens and weights. The upper 11 bits of the keys are counted once. There are
// up to three searches: for top_k, for top_p and for the drawn token. Each
// begins with that count, and then counts the next 11 and the last 10 bits of
// the keys in its own range.
#ifndef WEFT_KERNELS_CUDA_SAMPLE_SEARCH_CUH_
#define WEFT_KERNELS_CUDA_SAMPLE_SEARCH_CUH_

#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/sample_histogram.cuh"
#include "kernels/cuda/sample_row.cuh"

namespace weft::kernels::cuda {

// Passes that count the first bits, and passes that one search takes for the
// other bits.
constexpr int kFirstCounts = 1;
constexpr int kCountsOfSearch = 2;

struct Histograms {
  // All tokens, by the upper bits of their keys.
  Histogram first;
  // Tokens in the search's range, by the next bits. It is zero between two
  // counts.
  Histogram range;
};

// The aims of the searches, in order.
enum class Aim : int32_t { kTopK, kTopP, kDraw, kFound };

// The state of a rule's search. The search's range holds the keys that have the
// same upper bits as `low`: 0 bits at level 0, 11 at level 1, 22 at level 2.
struct Search {
  Aim aim = Aim::kTopK;
  int32_t level = 0;        // The level of the next count.
  uint32_t low = 0;         // The smallest key of the range.
  uint32_t num_tokens = 0;  // Number of tokens that can be drawn.
  float max = 0;            // The largest logit, known after level 0.
  uint64_t total = 0;       // Weight of all tokens.
  uint64_t kept = 0;        // Weight that earlier filters keep.
  uint64_t above = 0;       // Weight of the keys above the range.
  // The part of the target that is left in the range: a number of tokens for
  // top_k, otherwise a weight. After the search it is the token's number,
  // counted from 1, among the tokens with key `low`.
  uint64_t rest = 0;
};

// Returns the number of a key's bits below those that a level counts.
__device__ inline int ShiftOf(int level) {
  return level == 0 ? 21 : (level == 1 ? 10 : 0);
}

// Returns the bucket of a key. It is kBuckets or more outside the range.
__device__ inline uint32_t BucketOf(const Search& search, uint32_t key) {
  const uint32_t bucket = (key - search.low) >> ShiftOf(search.level);
  // The last level has ten bits, so a larger bucket is outside the range.
  return search.level == 2 && bucket >= kBuckets / 2 ? kBuckets : bucket;
}

// Narrows the search to one bucket of its level.
__device__ inline void Narrow(const Bucket& bucket, Search* search) {
  search->low += bucket.index << ShiftOf(search->level);
  search->above += bucket.weight_above;
  search->rest = bucket.rest;
  ++search->level;
}

// Begins the search for `aim`, or for the next aim that the rule has.
__device__ inline void Begin(const SampleRule& rule, Aim aim,
                             const Buckets& first, Search* search) {
  uint64_t target = 0;
  if (aim == Aim::kTopK) {
    target = static_cast<uint64_t>(rule.top_k);
    // Only num_tokens tokens have a weight, so a top_k of more keeps all.
    if (rule.top_k <= 0 || target >= search->num_tokens) aim = Aim::kTopP;
  }
  if (aim == Aim::kTopP) {
    const double wanted = ceil(rule.top_p * static_cast<double>(search->kept));
    target = wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
    // The conversion of `kept` to f64 may have rounded up.
    if (target > search->kept) target = search->kept;
    if (!(rule.top_p < 1)) aim = Aim::kDraw;
  }
  if (aim == Aim::kDraw) {
    target = TargetOf(search->kept,
                      Philox24(rule.seed, rule.sample_index, rule.position));
  }
  search->aim = aim;
  search->level = 0;
  search->low = 0;
  search->above = 0;
  Narrow(first.Find(aim == Aim::kTopK, target), search);
}

// Advances the search by the counts of its level. All threads call it with the
// same search.
__device__ inline void Advance(const SampleRule& rule, Histograms* histograms,
                               Search* search) {
  if (search->level == 0) {
    const Buckets first(histograms->first);
    search->num_tokens = static_cast<uint32_t>(first.num_tokens());
    search->total = search->kept = first.weight();
    Begin(rule, Aim::kTopK, first, search);
    return;
  }
  const bool counts = search->aim == Aim::kTopK;
  const Bucket bucket = Buckets(histograms->range).Find(counts, search->rest);
  for (int i = static_cast<int>(threadIdx.x); i < kBuckets;
       i += kCountThreads) {
    histograms->range.counts[i] = 0;
    histograms->range.weights[i] = 0;
  }
  Narrow(bucket, search);
  if (search->level <= kCountsOfSearch) return;
  // The bucket is one key, so all its tokens have the same weight.
  const uint64_t each = bucket.weight / bucket.count;
  if (!counts) search->rest = (search->rest + each - 1) / each;
  if (search->aim == Aim::kDraw) {
    search->aim = Aim::kFound;
    return;
  }
  search->kept = search->above + search->rest * each;
  Begin(rule, search->aim == Aim::kTopK ? Aim::kTopP : Aim::kDraw,
        Buckets(histograms->first), search);
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_SAMPLE_SEARCH_CUH_
