// Finds a rule's top_k limit, its top_p limit and its drawn token, each with
// one search in the order of logits. A search is a radix select over histograms
// of keys. All searches of a rule share one histogram of the upper 11 bits of
// all keys. Each search then needs two more histograms of the keys in its
// range: one of their next 11 bits, and one of their last 10 bits.
#ifndef WEFT_KERNELS_CUDA_SAMPLE_SEARCH_CUH_
#define WEFT_KERNELS_CUDA_SAMPLE_SEARCH_CUH_

#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/sample_histogram.cuh"
#include "kernels/cuda/sample_row.cuh"

namespace weft::kernels::cuda {

// The number of CountKernel launches that count the upper bits of keys, and the
// number of further launches that each search needs for the lower bits.
constexpr int kFirstCounts = 1;
constexpr int kCountsOfSearch = 2;

struct Histograms {
  // All tokens with a weight above 0, by the upper bits of their keys.
  Histogram first;
  // The tokens of `first` in the search's range, by the next bits of their
  // keys. Advance clears this histogram after each count.
  Histogram range;
  uint64_t likely;  // Weight of the tokens that min_p keeps, if there is one.
};

// What a search looks for. The searches run in this order. kFound means that
// all searches are done.
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
  uint64_t likely = 0;      // Weight of all tokens that min_p keeps.
  uint64_t kept = 0;        // Weight that earlier filters keep.
  uint64_t above = 0;       // Weight of the keys above the range.
  // The target minus the sum over the keys above the range. For top_k it is a
  // number of tokens, otherwise a weight. After the last search, `rest` is the
  // drawn token's number, counted from 1, among the tokens with key `low`.
  uint64_t rest = 0;
};

// Returns the number of a key's bits that are lower than the bits counted at
// `level`.
__device__ inline int ShiftOf(int level) {
  return level == 0 ? 21 : (level == 1 ? 10 : 0);
}

// Returns the bucket of a key, or a number >= kBuckets if the key is outside
// the range.
__device__ inline uint32_t BucketOf(const Search& search, uint32_t key) {
  const uint32_t bucket = (key - search.low) >> ShiftOf(search.level);
  // The last level has 10 bits, so its range has kBuckets / 2 buckets.
  return search.level == 2 && bucket >= kBuckets / 2 ? kBuckets : bucket;
}

// Narrows the search to one bucket, and moves it to the next level.
__device__ inline void Narrow(const Bucket& bucket, Search* search) {
  search->low += bucket.index << ShiftOf(search->level);
  search->above += bucket.weight_above;
  search->rest = bucket.rest;
  ++search->level;
}

// Begins the search for `aim`. If `aim` is a filter that the rule lacks or that
// keeps all tokens, begins the search for the next aim instead. `first` is the
// histogram of the upper bits.
__device__ inline void Begin(const SampleRule& rule, Aim aim,
                             const Buckets& first, Search* search) {
  uint64_t target = 0;
  if (aim == Aim::kTopK) {
    target = static_cast<uint64_t>(rule.top_k);
    // Only num_tokens tokens can be drawn. A top_k of num_tokens or more keeps
    // them all.
    if (rule.top_k <= 0 || target >= search->num_tokens) aim = Aim::kTopP;
  }
  if (aim == Aim::kTopP) {
    const double wanted = ceil(rule.top_p * static_cast<double>(search->kept));
    target = wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
    // The conversion of `kept` to f64 may round up, so `target` may exceed
    // `kept`.
    if (target > search->kept) target = search->kept;
    if (!(rule.top_p < 1)) aim = Aim::kDraw;
  }
  if (aim == Aim::kDraw) {
    // min_p keeps a prefix of the order, as the other filters do. So the tokens
    // that all filters keep are the shorter prefix.
    if (search->kept > search->likely) search->kept = search->likely;
    target = TargetOf(search->kept,
                      Philox24(rule.seed, rule.sample_index, rule.position));
  }
  search->aim = aim;
  search->level = 0;
  search->low = 0;
  search->above = 0;
  Narrow(first.Find(aim == Aim::kTopK, target), search);
}

// Advances the search with the counts of its level. All threads call it with
// the same search.
__device__ inline void Advance(const SampleRule& rule, Histograms* histograms,
                               Search* search) {
  if (search->level == 0) {
    const Buckets first(histograms->first);
    search->num_tokens = static_cast<uint32_t>(first.num_tokens());
    search->total = search->kept = first.weight();
    search->likely =
        rule.min_p > 0 ? __ldcg(&histograms->likely) : search->total;
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
  // After the last level, the bucket is one key, so all its tokens have the
  // same weight.
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
