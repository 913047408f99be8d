#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/philox.cuh"
#include "kernels/cuda/sample_histogram.cuh"
#include "kernels/cuda/sample_row.cuh"
#include "kernels/cuda/sample_search.cuh"
#include "kernels/cuda/sampler.h"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr int64_t kWarps = kThreads / kWarp;
// Blocks of DrawKernel per multiprocessor. Several blocks share a
// multiprocessor, because a block mostly waits for memory.
constexpr unsigned kDrawBlocks = 6;
// The intended number of CountKernel's blocks for all rules: two for each
// multiprocessor of a large device. More blocks would take longer, because each
// block clears and adds a histogram. Each rule has at least one block.
constexpr int64_t kCountBlocks = 264;
constexpr int64_t kCountWarps = kCountThreads / kWarp;

// Device memory in which each kernel of a SampleTokens call leaves data for the
// next kernels. C is the number of chunks of a row.
struct Workspace {
  Histograms* histograms_N;  // Used only with filters.
  Search* searches_N;
  uint64_t* chunk_sums_NC;
  float* chunk_max_NC;  // +inf for a chunk that has a NaN or +inf.
  unsigned* counters_N;
  int64_t num_chunks;
};

// Places the parts of a memory area one after another.
class Area {
 public:
  explicit Area(void* begin) : begin_(reinterpret_cast<uintptr_t>(begin)) {}
  template <typename T>
  T* Take(int64_t size) {
    T* part = reinterpret_cast<T*>(begin_ + num_bytes_);
    num_bytes_ += (static_cast<size_t>(size) * sizeof(T) + 15) / 16 * 16;
    return part;
  }
  size_t num_bytes() const { return num_bytes_; }

 private:
  uintptr_t begin_;  // 0 if the area is only measured.
  size_t num_bytes_ = 0;
};

Workspace Divide(Area* area, int64_t num_rules, int64_t vocab,
                 int max_filters) {
  const int64_t num_chunks = CeilDiv(vocab, kChunk);
  return {
      .histograms_N = area->Take<Histograms>(max_filters > 0 ? num_rules : 0),
      .searches_N = area->Take<Search>(num_rules),
      .chunk_sums_NC = area->Take<uint64_t>(num_rules * num_chunks),
      .chunk_max_NC = area->Take<float>(num_rules * num_chunks),
      .counters_N = area->Take<unsigned>(num_rules),
      .num_chunks = num_chunks};
}

// Returns the maximum of the row's chunks. All threads call it.
__device__ float RowMax(const Workspace& space, int64_t n) {
  float max = -INFINITY;
  for (int64_t chunk = threadIdx.x; chunk < space.num_chunks;
       chunk += blockDim.x) {
    max = fmaxf(max, space.chunk_max_NC[n * space.num_chunks + chunk]);
  }
  return BlockReduce(max, Max());
}

// Computes every chunk's maximum and initialises the workspace for the next
// kernels.
__global__ void __launch_bounds__(kThreads)
    ChunkMaxKernel(SampleRows rows, Workspace space, unsigned parts) {
  const int64_t n = blockIdx.x / parts;
  const unsigned part = blockIdx.x % parts;
  const SampleRule rule = rows.rules_N[n];
  if (part == 0 && threadIdx.x == 0) {
    space.counters_N[n] = 0;
    space.searches_N[n] = Search();
  }
  if (IsFiltered(rule) && rows.max_filters > 0) {
    auto* words = reinterpret_cast<uint4*>(&space.histograms_N[n]);
    for (size_t i = part * kThreads + threadIdx.x;
         i < sizeof(Histograms) / sizeof(uint4); i += parts * kThreads) {
      words[i] = {0, 0, 0, 0};
    }
  }
  const int64_t chunk = part * kWarps + WarpIndex();
  if (chunk >= space.num_chunks) return;
  float x[kOfLane];
  LoadChunk(rows, rule.row, chunk, x);
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    max = fmaxf(max, x[i] < INFINITY ? x[i] : INFINITY);  // NaN becomes inf.
  }
  max = WarpReduce(max, Max());
  if (Lane() == 0) space.chunk_max_NC[n * space.num_chunks + chunk] = max;
}

// Counts the keys in the range of each filtered rule's search. For each rule,
// the block that finishes last advances the search.
__global__ void __launch_bounds__(kCountThreads)
    CountKernel(SampleRows rows, Workspace space, unsigned parts) {
  const int64_t n = blockIdx.x / parts;
  const unsigned part = blockIdx.x % parts;
  const SampleRule rule = rows.rules_N[n];
  if (!IsFiltered(rule)) return;
  Search search = space.searches_N[n];
  if (search.aim == Aim::kFound) return;
  __shared__ BlockHistogram counted;
  counted.Clear();
  if (search.level == 0) search.max = RowMax(space, n);
  if (!IsDistribution(search.max)) return;
  const Row row = RowOf(rows, rule, search.max);
  // The first count also adds up what min_p keeps. No ratio is positive.
  const bool sums_likely = search.level == 0 && rule.min_p > 0;
  const float least_ratio = sums_likely ? logf(rule.min_p) : INFINITY;
  uint64_t likely = 0;
  __syncthreads();
  for (int64_t chunk = part * kCountWarps + WarpIndex();
       chunk < space.num_chunks; chunk += parts * kCountWarps) {
    const float max = space.chunk_max_NC[n * space.num_chunks + chunk];
    if (KeyOf(max) < search.low) continue;
    float x[kOfLane];
    LoadChunk(rows, rule.row, chunk, x);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const uint32_t bucket = BucketOf(search, KeyOf(x[i]));
      if (bucket >= kBuckets) continue;
      const uint64_t weight = row.Weight(x[i]);
      if (weight > 0) counted.Add(bucket, weight);
      if (row.LogRatio(x[i]) >= least_ratio) likely += weight;
    }
  }
  __syncthreads();
  Histograms* histograms = &space.histograms_N[n];
  if (sums_likely) {
    likely = WarpReduce(likely, Add());
    if (Lane() == 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(&histograms->likely),
                static_cast<unsigned long long>(likely));
    }
  }
  counted.AddTo(search.level == 0 ? &histograms->first : &histograms->range);
  if (!IsLastBlock(&space.counters_N[n], parts)) return;
  Advance(rule, histograms, &search);
  if (threadIdx.x == 0) space.searches_N[n] = search;
}

// Defines the tokens that a rule may draw. `key` is used only if the rule has
// filters. It is the key of the drawn token, which the search has found.
struct Draw {
  Row row;
  bool greedy;
  bool filtered;
  uint32_t key;

  // Returns what a logit adds to the sum that locates the drawn token. This is
  // the logit's weight. If the rule is greedy or filtered, it is instead 1 for
  // each token that may be drawn, and 0 for the others.
  __device__ uint64_t Measure(float x) const {
    if (greedy) return x == row.max ? 1 : 0;
    if (filtered) return KeyOf(x) == key ? 1 : 0;
    return row.Weight(x);
  }
  // Returns what a logit adds to its chunk's sum. A greedy rule adds weights
  // here, because its logprob needs their total.
  __device__ uint64_t ChunkMeasure(float x) const {
    return greedy ? row.Weight(x) : Measure(x);
  }
};

// Finds the chunk of the drawn token by the chunks' sums or, if the rule is
// greedy, by their maxima. Then finds the token in the chunk, and writes it and
// its logprob. Reads the rule and the search again, because DrawKernel's
// registers cannot hold them together with a chunk.
__device__ void Finish(const SampleRows& rows, const Workspace& space,
                       int64_t n, const Draw& draw) {
  const SampleRule rule = rows.rules_N[n];
  const uint64_t* sums = space.chunk_sums_NC + n * space.num_chunks;
  const float* maxima = space.chunk_max_NC + n * space.num_chunks;
  uint64_t total = space.searches_N[n].total;
  uint64_t target = space.searches_N[n].rest;
  if (!draw.filtered) {
    total = 0;
    for (int64_t chunk = threadIdx.x; chunk < space.num_chunks;
         chunk += kThreads) {
      total += __ldcg(&sums[chunk]);
    }
    total = BlockReduce(total, Add());
    target = draw.greedy
                 ? 1
                 : TargetOf(total, Philox24(rule.seed, rule.sample_index,
                                            rule.position));
  }
  const Place chunk = FindInOrder(static_cast<int>(space.num_chunks), target,
                                  [&](int c) -> uint64_t {
                                    if (draw.greedy)
                                      return maxima[c] == draw.row.max ? 1 : 0;
                                    return __ldcg(&sums[c]);
                                  });
  const int64_t begin = chunk.item * kChunk;
  const int64_t size =
      rows.vocab - begin < kChunk ? rows.vocab - begin : kChunk;
  const float* logits = draw.row.logits + begin;
  const Place token =
      FindInOrder(static_cast<int>(size), chunk.rest,
                  [&](int t) { return draw.Measure(logits[t]); });
  if (threadIdx.x != 0) return;
  rows.tokens_N[n] = static_cast<int32_t>(begin + token.item);
  const double log_total =
      log(static_cast<double>(total) / static_cast<double>(kUnitsPerOne));
  const double d = (static_cast<double>(logits[token.item]) - draw.row.max) *
                   static_cast<double>(draw.row.inverse_temperature);
  rows.logprobs_N[n] = static_cast<float>(d - log_total);
  rows.log_totals_N[n] = log_total;
}

// Computes the sum of each chunk. For each rule, the block that finishes last
// draws the token.
__global__ void __launch_bounds__(kThreads, kDrawBlocks)
    DrawKernel(SampleRows rows, Workspace space, unsigned parts) {
  const int64_t n = blockIdx.x / parts;
  const unsigned part = blockIdx.x % parts;
  const SampleRule rule = rows.rules_N[n];
  const bool filtered = IsFiltered(rule);
  Search search;
  if (filtered) search = space.searches_N[n];
  const int64_t chunk = part * kWarps + WarpIndex();
  float x[kOfLane];
  bool counts = chunk < space.num_chunks;
  if (counts && filtered) {
    const float max = space.chunk_max_NC[n * space.num_chunks + chunk];
    counts = KeyOf(max) >= search.low;
  }
  // Starts to load the chunk before RowMax reads the maxima, so that the two
  // loads overlap.
  if (counts) LoadChunk(rows, rule.row, chunk, x);
  const float max = RowMax(space, n);
  if (!IsDistribution(max) || (filtered && search.aim != Aim::kFound)) {
    if (part == 0 && threadIdx.x == 0) {
      rows.tokens_N[n] = -1;
      rows.logprobs_N[n] = NAN;
    }
    return;
  }
  const Draw draw = {RowOf(rows, rule, max), rule.temperature == 0, filtered,
                     search.low};
  uint64_t sum = 0;
  if (counts) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sum += draw.ChunkMeasure(x[i]);
    sum = WarpReduce(sum, Add());
  }
  if (chunk < space.num_chunks && Lane() == 0) {
    space.chunk_sums_NC[n * space.num_chunks + chunk] = sum;
  }
  if (!IsLastBlock(&space.counters_N[n], parts)) return;
  Finish(rows, space, n, draw);
}

}  // namespace

size_t SampleWorkspaceBytes(int64_t num_rules, int64_t vocab, int max_filters) {
  Area area(nullptr);
  static_cast<void>(Divide(&area, num_rules, vocab, max_filters));
  return area.num_bytes();
}

cudaError_t SampleTokens(const SampleRows& rows, cudaStream_t stream) {
  if (rows.num_rules == 0) return cudaSuccess;
  if (rows.vocab < 1 || rows.vocab > kMaxSampleVocab || rows.max_filters < 0 ||
      rows.max_filters > 2) {
    return cudaErrorInvalidValue;
  }
  Area area(rows.workspace);
  const Workspace space =
      Divide(&area, rows.num_rules, rows.vocab, rows.max_filters);
  const int64_t parts = CeilDiv(space.num_chunks, kWarps);
  const auto launch = [&](auto kernel, int64_t blocks_of_rule,
                          unsigned threads) {
    return Launch(kernel, rows.num_rules * blocks_of_rule, 1, threads, stream,
                  rows, space, static_cast<unsigned>(blocks_of_rule));
  };
  cudaError_t status = launch(ChunkMaxKernel, parts, kThreads);
  if (rows.max_filters > 0) {
    // In each round, a block counts kCountWarps chunks, one per warp. A block
    // has at most `rounds` rounds.
    const int64_t most = CeilDiv(space.num_chunks, kCountWarps);
    const int64_t wanted = CeilDiv(kCountBlocks, rows.num_rules);
    const int64_t rounds = CeilDiv(most, wanted < most ? wanted : most);
    const int num_counts =
        kFirstCounts + kCountsOfSearch * (rows.max_filters + 1);
    for (int i = 0; i < num_counts && status == cudaSuccess; ++i) {
      status = launch(CountKernel, CeilDiv(most, rounds), kCountThreads);
    }
  }
  return status == cudaSuccess ? launch(DrawKernel, parts, kThreads) : status;
}

}  // namespace weft::kernels::cuda
