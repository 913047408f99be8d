#include <cstdint>

#include "kernels/cuda/block_scan.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/sample_histogram.cuh"
#include "kernels/cuda/sample_row.cuh"
#include "kernels/cuda/sample_search.cuh"
#include "kernels/cuda/token_lists.h"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 1024;

// Where a list ends in the order of logits: at the token number `rest`, counted
// from 1, among the tokens with key `low`.
struct ListEnd {
  uint32_t low = 0;
  uint64_t rest = 0;
};

// Finds the end of a list of `size` tokens by a radix select over histograms of
// keys. All threads call it.
__device__ ListEnd FindEnd(const float* logits, int64_t vocab, int32_t size) {
  __shared__ uint32_t counts[kBuckets];
  Search search;  // Its range.
  search.rest = static_cast<uint64_t>(size);
  for (; search.level <= kCountsOfSearch; ++search.level) {
    for (unsigned i = threadIdx.x; i < kBuckets; i += kThreads) counts[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < vocab; i += kThreads) {
      const uint32_t bucket = BucketOf(search, KeyOf(logits[i]));
      if (bucket < kBuckets) atomicAdd(&counts[bucket], 1U);
    }
    __syncthreads();
    const Place place = FindInOrder(
        kBuckets, search.rest,
        [&](int i) -> uint64_t { return counts[kBuckets - 1 - i]; });
    search.low += static_cast<uint32_t>(kBuckets - 1 - place.item)
                  << ShiftOf(search.level);
    search.rest = place.rest;
  }
  return {search.low, search.rest};
}

// The numbers of tokens above the end's key, and of those with this key.
struct Counts {
  uint64_t above = 0;
  uint64_t equal = 0;
};

// A block lists the tokens of a row. Each warp has a part of the row.
__global__ void __launch_bounds__(kThreads) ListTokensKernel(TokenLists lists) {
  const TokenList list = lists.lists_N[blockIdx.x];
  const float* const logits = lists.logits_MV + list.row * lists.row_stride;
  const ListEnd end = FindEnd(logits, lists.vocab, list.size);
  const int64_t part =
      (lists.vocab + kThreads - 1) / kThreads * kWarp;  // Of a warp.
  const int64_t begin = WarpIndex() * part;
  const int64_t stop = begin + part < lists.vocab ? begin + part : lists.vocab;
  Counts own;
  for (int64_t i = begin + Lane(); i < stop; i += kWarp) {
    const uint32_t key = KeyOf(logits[i]);
    own.above += key > end.low ? 1 : 0;
    own.equal += key == end.low ? 1 : 0;
  }
  // The counts of a warp are those of its lanes, so the scan gives the lane 0
  // what the earlier warps have.
  uint64_t total = 0;
  Counts before = {BlockScan(own.above, &total), BlockScan(own.equal, &total)};
  before.above = __shfl_sync(kAllLanes, before.above, 0);
  before.equal = __shfl_sync(kAllLanes, before.equal, 0);
  const unsigned lower_lanes = (1U << Lane()) - 1;
  for (int64_t first = begin; first < stop; first += kWarp) {
    const int64_t i = first + Lane();
    const float x = i < stop ? logits[i] : 0;
    const bool above = i < stop && KeyOf(x) > end.low;
    const bool equal = i < stop && KeyOf(x) == end.low;
    const unsigned all_above = __ballot_sync(kAllLanes, above);
    const unsigned all_equal = __ballot_sync(kAllLanes, equal);
    const uint64_t earlier_above =
        before.above + __popc(all_above & lower_lanes);
    const uint64_t earlier_equal =
        before.equal + __popc(all_equal & lower_lanes);
    if (above || (equal && earlier_equal < end.rest)) {
      const uint64_t listed_equal =
          earlier_equal < end.rest ? earlier_equal : end.rest;
      const auto place =
          list.begin + static_cast<int64_t>(earlier_above + listed_equal);
      lists.tokens[place] = static_cast<int32_t>(i);
      lists.logits[place] = x;
    }
    before.above += __popc(all_above);
    before.equal += __popc(all_equal);
  }
}

}  // namespace

cudaError_t ListTokens(const TokenLists& lists, cudaStream_t stream) {
  if (lists.num_lists == 0) return cudaSuccess;
  return Launch(ListTokensKernel, lists.num_lists, 1, kThreads, stream, lists);
}

}  // namespace weft::kernels::cuda
