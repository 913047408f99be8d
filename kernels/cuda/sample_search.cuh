// The sampler's search in order of logit: radix select over histograms of
// tokens and weights. A key's upper 11 bits are counted once; every search, for
// top_k, for top_p and for the token drawn, begins there and then counts the
// next 11 and the last 10 bits of the keys in its own range.
#ifndef WEFT_KERNELS_CUDA_SAMPLE_SEARCH_CUH_
#define WEFT_KERNELS_CUDA_SAMPLE_SEARCH_CUH_

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/sample_row.cuh"

namespace weft::kernels::cuda {

constexpr int kBuckets = 2048;
// Threads of a block of the kernel that counts.
constexpr int kCountThreads = 512;
// Passes that count: for the first bits, and for the rest of one search.
constexpr int kFirstCounts = 1;
constexpr int kCountsOfSearch = 2;

// In each bucket, tokens that can be drawn, and their weights.
struct alignas(16) Histogram {
  uint64_t weights[kBuckets];
  uint32_t counts[kBuckets];
};
struct Histograms {
  // By the upper bits, of all tokens.
  Histogram first;
  // By the next bits, of the search's range; zeros between two counts.
  Histogram range;
};

// What is searched for, one after the other.
enum class Aim : int32_t { kTopK, kTopP, kDraw, kFound };

// How far a rule's search has come. Its range is the keys that share their
// upper bits with `low`: none at level 0, 11 at level 1, 22 at level 2.
struct Search {
  Aim aim = Aim::kTopK;
  int32_t level = 0;        // The level of the next count.
  uint32_t low = 0;         // The smallest key of the range.
  uint32_t num_tokens = 0;  // How many tokens can be drawn.
  float max = 0;            // The largest logit, once level 0 is counted.
  uint64_t total = 0;       // Weight of all tokens.
  uint64_t kept = 0;        // Weight that the filters so far keep.
  uint64_t above = 0;       // Weight of the keys above the range.
  // What is left of the target in the range: a number of tokens for top_k, a
  // weight otherwise. Once the token is found: its number, from 1, among the
  // tokens of key `low`.
  uint64_t rest = 0;
};

// Bits of a key below those that a level counts.
__device__ inline int ShiftOf(int level) {
  return level == 0 ? 21 : (level == 1 ? 10 : 0);
}

// The bucket of a key, kBuckets or more outside the range.
__device__ inline uint32_t BucketOf(const Search& search, uint32_t key) {
  const uint32_t bucket = (key - search.low) >> ShiftOf(search.level);
  // Ten bits at the last level: what is above is another range's.
  return search.level == 2 && bucket >= kBuckets / 2 ? kBuckets : bucket;
}

// A histogram of one block's tokens in its shared memory. Weights in halves:
// there is no fast addition of 64 bits.
struct alignas(16) BlockHistogram {
  uint32_t counts[kBuckets];
  uint32_t low[kBuckets];
  uint32_t high[kBuckets];

  // All threads call it; the next barrier makes it so.
  __device__ void Clear() {
    auto* words = reinterpret_cast<uint4*>(counts);
    for (size_t i = threadIdx.x; i < sizeof(*this) / sizeof(uint4);
         i += kCountThreads) {
      words[i] = {0, 0, 0, 0};
    }
  }
  __device__ void Add(uint32_t bucket, uint64_t weight) {
    atomicAdd(&counts[bucket], 1U);
    const auto own = static_cast<uint32_t>(weight);
    const uint32_t before = atomicAdd(&low[bucket], own);
    const uint32_t carry = before + own < own ? 1 : 0;
    const uint32_t upper = static_cast<uint32_t>(weight >> 32) + carry;
    if (upper != 0) atomicAdd(&high[bucket], upper);
  }
  // Adds it to the row's. All threads call it, after a barrier.
  __device__ void AddTo(Histogram* sum) const {
    for (int i = static_cast<int>(threadIdx.x); i < kBuckets;
         i += kCountThreads) {
      if (counts[i] == 0) continue;
      atomicAdd(&sum->counts[i], counts[i]);
      // CUDA has the addition for this type of 64 bits alone.
      atomicAdd(reinterpret_cast<unsigned long long*>(&sum->weights[i]),
                static_cast<unsigned long long>(high[i]) << 32 | low[i]);
    }
  }
};

// A bucket, and what is above it.
struct Bucket {
  uint32_t index;
  uint32_t count;
  uint64_t weight;
  uint64_t weight_above;
  uint64_t rest;  // What is left of the target.
};

// A row's histogram, spread over the threads of a block, largest keys first.
class Buckets {
 public:
  // All threads construct it. Other blocks have written the histogram.
  __device__ explicit Buckets(const Histogram& histogram) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      counts_[i] = __ldcg(&histogram.counts[First() - i]);
      weights_[i] = __ldcg(&histogram.weights[First() - i]);
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      own_count_ += counts_[i];
      own_weight_ += weights_[i];
    }
    count_above_ = BlockScan(own_count_, &num_tokens_);
    weight_above_ = BlockScan(own_weight_, &weight_);
  }

  [[nodiscard]] __device__ uint64_t num_tokens() const { return num_tokens_; }
  [[nodiscard]] __device__ uint64_t weight() const { return weight_; }

  // The bucket with which the tokens or the weights sum up to `target`, 1 to
  // the whole sum. All threads call it.
  [[nodiscard]] __device__ Bucket Find(bool counts, uint64_t target) const {
    __shared__ Bucket found;
    uint64_t above = counts ? count_above_ : weight_above_;
    const uint64_t own = counts ? own_count_ : own_weight_;
    if (above < target && target - above <= own) {
      uint64_t weight_above = weight_above_;
#pragma unroll
      for (int i = 0; i < kOfThread; ++i) {
        const uint64_t measure = counts ? counts_[i] : weights_[i];
        if (above < target && target - above <= measure) {
          found = {static_cast<uint32_t>(First() - i), counts_[i], weights_[i],
                   weight_above, target - above};
        }
        above += measure;
        weight_above += weights_[i];
      }
    }
    __syncthreads();
    const Bucket bucket = found;
    // Before the next call overwrites what others still read.
    __syncthreads();
    return bucket;
  }

 private:
  static constexpr int kOfThread = kBuckets / kCountThreads;
  [[nodiscard]] __device__ static int First() {
    return kBuckets - 1 - static_cast<int>(threadIdx.x) * kOfThread;
  }

  uint32_t counts_[kOfThread];
  uint64_t weights_[kOfThread];
  uint64_t own_count_ = 0, own_weight_ = 0;      // This thread's buckets.
  uint64_t count_above_ = 0, weight_above_ = 0;  // Those of threads before it.
  uint64_t num_tokens_ = 0, weight_ = 0;         // All buckets.
};

// Goes into a bucket of what the search's level has counted.
__device__ inline void Narrow(const Bucket& bucket, Search* search) {
  search->low += bucket.index << ShiftOf(search->level);
  search->above += bucket.weight_above;
  search->rest = bucket.rest;
  ++search->level;
}

// Begins the search for `aim`, or for the next one that the rule has.
__device__ inline void Begin(const SampleRule& rule, Aim aim,
                             const Buckets& first, Search* search) {
  uint64_t target = 0;
  if (aim == Aim::kTopK) {
    target = static_cast<uint64_t>(rule.top_k);
    // Those it would keep beyond num_tokens have no weight.
    if (rule.top_k <= 0 || target >= search->num_tokens) aim = Aim::kTopP;
  }
  if (aim == Aim::kTopP) {
    const double wanted = ceil(rule.top_p * static_cast<double>(search->kept));
    target = wanted < 1 ? 1 : static_cast<uint64_t>(wanted);
    // A rounding of `kept` to f64 may have gone up.
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

// Goes on from what has been counted for the search's level. All threads call
// it, with the same search.
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
  // The bucket is one key; all of its tokens weigh the same.
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
