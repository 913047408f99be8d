#include <algorithm>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/paged_attention_warp.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = kAttentionThreads;
constexpr int kNumWarps = kAttentionWarps;
// About two blocks for each of 132 multiprocessors keep a large device busy.
constexpr int64_t kWantedBlocks = 256;
// A sequence gets at most one split per kMinSplitTokens tokens, and at least
// one per kMaxSplitTokens if splits.most allows. Starting and merging a split
// takes 5 to 10 us on an H100, so a shorter split would cost more than it
// saves. Longer splits leave multiprocessors idle at the end: 64 sequences of
// 8,192 tokens take 766 us whole and 726 us split.
constexpr int kMinSplitTokens = 128;
constexpr int kMaxSplitTokens = 2048;
// The most groups of heads (grid.x) in a launch with splits. A group is up to
// kStepHeads query heads that share a key/value head.
constexpr int64_t kMaxSplitItems = 8192;

// Counts, for each group of heads, the splits that have written to the
// workspace. All counts are 0 between launches.
__device__ unsigned finished_splits[kMaxSplitItems];

// Returns the number of query heads that share a key/value head. Device code
// here divides in 32 bits, because 64-bit divisions are function calls.
__host__ __device__ inline unsigned GroupSize(
    const PagedAttentionBatch& batch) {
  return static_cast<unsigned>(batch.num_heads) /
         static_cast<unsigned>(batch.num_kv_heads);
}
__host__ __device__ inline unsigned HeadChunks(
    const PagedAttentionBatch& batch) {
  return (GroupSize(batch) + kStepHeads - 1) / kStepHeads;
}

// Returns the number of groups of heads. A launch without splits has one block
// for each group.
inline int64_t NumItems(const PagedAttentionBatch& batch) {
  return batch.batch * batch.num_kv_heads * HeadChunks(batch);
}

// Returns the number of splits for `tokens` visible tokens; 0 for no tokens.
__host__ __device__ inline int NumSplits(const AttentionSplits& splits,
                                         int64_t tokens) {
  const auto one_per = [&](int split_tokens) {
    return static_cast<int>((tokens + split_tokens - 1) / split_tokens);
  };
  const int few = one_per(kMinSplitTokens);
  const int many = one_per(kMaxSplitTokens);
  const int wanted = few < splits.wanted ? few : splits.wanted;
  const int num_splits = many < wanted ? wanted : many;
  return num_splits < splits.most ? num_splits : splits.most;
}

// Returns the block's sequence and heads. blockIdx.x is the index of a group of
// heads. Groups are ordered by sequence, then by key/value head, then by chunk
// of its query heads.
__device__ BlockWork HeadsOfBlock(const PagedAttentionBatch& batch) {
  BlockWork work = {};
  const unsigned chunks = HeadChunks(batch);
  const auto kv_heads = static_cast<unsigned>(batch.num_kv_heads);
  const auto group = static_cast<int>(GroupSize(batch));
  const int first = static_cast<int>(blockIdx.x % chunks) * kStepHeads;
  work.kv_head = static_cast<int>(blockIdx.x / chunks % kv_heads);
  work.sequence = static_cast<int>(blockIdx.x / chunks / kv_heads);
  work.row = work.sequence * batch.num_heads + work.kv_head * group + first;
  work.num_heads = group - first < kStepHeads ? group - first : kStepHeads;
  return work;
}

// Sets the number of splits and the block's tokens, given the sequence's
// length. The kernel does this and not the host, because a launch may be queued
// before the length is known.
__device__ void SetTokens(const PagedAttentionBatch& batch, int length,
                          BlockWork* work) {
  const int hidden = batch.window > 0 && batch.window < length
                         ? length - static_cast<int>(batch.window)
                         : 0;
  const int num_splits = NumSplits(batch.splits, length - hidden);
  work->num_splits = num_splits < 1 ? 1 : num_splits;
  const auto steps =
      static_cast<unsigned>(length - hidden + kStepTokens - 1) / kStepTokens;
  const auto count = static_cast<unsigned>(work->num_splits);
  // Each of the first `rest` splits takes one step more than the others.
  const auto bound = [&](unsigned split) {
    const unsigned rest = steps % count;
    const unsigned step = steps / count * split + (split < rest ? split : rest);
    const int token = hidden + static_cast<int>(step) * kStepTokens;
    return token < length ? token : length;
  };
  work->begin = bound(blockIdx.y);
  work->end = bound(blockIdx.y + 1);
}

// Return where the workspace holds a split's mean and its base-2 log-sum-exp
// for one row (query head). The means of all splits come first.
__device__ float* SplitMean(const PagedAttentionBatch& batch, int split,
                            int64_t row) {
  return batch.workspace +
         (split * batch.batch * batch.num_heads + row) * batch.head_features;
}
__device__ float* SplitLse(const PagedAttentionBatch& batch, int split,
                           int64_t row) {
  const int64_t rows = batch.batch * batch.num_heads;
  return batch.workspace + batch.splits.most * rows * batch.head_features +
         split * rows + row;
}

// Calls function(i, c) for each of the lane's features c; i counts them from 0.
template <int kChunks, typename Function>
__device__ void ForFeatures(const PagedAttentionBatch& batch,
                            Function function) {
#pragma unroll
  for (int i = 0; i < kChunks * kFeatureChunk / kWarp; ++i) {
    const int c = Lane() + i * kWarp;
    if (c < static_cast<int>(batch.head_features)) function(i, c);
  }
}

// Returns what the sink of a row's head adds to the row's sum of 2^(score -
// top); 0 without sinks.
__device__ float SinkWeight(const PagedAttentionBatch& batch, int64_t row,
                            float top) {
  if (batch.sinks_H == nullptr) return 0;
  const auto head =
      static_cast<unsigned>(row) % static_cast<unsigned>(batch.num_heads);
  return exp2f(batch.sinks_H[head] * kLog2E - top);
}

// Merges the sums of the block's warps. Writes the means to the output or, if
// there are several splits, to the workspace. Each warp takes one head at a
// time.
template <typename T, int kChunks>
__device__ void StoreBlock(const PagedAttentionBatch& batch,
                           const BlockWork& work,
                           const BlockMemory<T, kChunks>& memory) {
  const auto split = static_cast<int>(blockIdx.y);
  for (int head = WarpIndex(); head < work.num_heads; head += kNumWarps) {
    float top = kLowest;
    for (int w = 0; w < kNumWarps; ++w) top = fmaxf(top, memory.max[w][head]);
    float shrink[kNumWarps];
    float total = 0;
#pragma unroll
    for (int w = 0; w < kNumWarps; ++w) {
      shrink[w] = exp2f(memory.max[w][head] - top);
      total += memory.sum[w][head] * shrink[w];
    }
    const int64_t row = work.row + head;
    T* out = static_cast<T*>(batch.out_BHC) + row * batch.head_features;
    const float sum =
        work.num_splits == 1 ? total + SinkWeight(batch, row, top) : total;
    ForFeatures<kChunks>(batch, [&](int /*i*/, int c) {
      float value = 0;
#pragma unroll
      for (int w = 0; w < kNumWarps; ++w) {
        value += memory.sums[w][head][c] * shrink[w];
      }
      const float mean = work.begin < work.end ? value / sum : 0.0F;
      if (work.num_splits == 1) {
        Store(mean, out + c);
      } else {
        SplitMean(batch, split, row)[c] = mean;
      }
    });
    if (work.num_splits > 1 && Lane() == 0) {
      *SplitLse(batch, split, row) = top + log2f(total);
    }
  }
}

// Returns true only in the block that finishes last among the splits of its
// group. All threads call it.
__device__ bool IsLastSplit(int num_splits, bool* is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    // Makes the block's earlier writes visible to the last block.
    __threadfence();
    const auto last = static_cast<unsigned>(num_splits - 1);
    // The increment of the last block resets the counter to 0.
    *is_last = atomicInc(&finished_splits[blockIdx.x], last) == last;
    __threadfence();
  }
  __syncthreads();
  return *is_last;
}

// Merges the splits of the block's heads, in order, and writes the output. Each
// warp takes one head at a time.
template <typename T, int kChunks>
__device__ void MergeSplits(const PagedAttentionBatch& batch,
                            const BlockWork& work,
                            BlockMemory<T, kChunks>* memory) {
  for (int head = WarpIndex(); head < work.num_heads; head += kNumWarps) {
    const int64_t row = work.row + head;
    float* weights = memory->weights[head];
    float max = kLowest;
    for (int split = Lane(); split < work.num_splits; split += kWarp) {
      weights[split] = __ldcg(SplitLse(batch, split, row));
      max = fmaxf(max, weights[split]);
    }
    max = WarpReduce(max, Max());
    float total = 0;
    for (int split = Lane(); split < work.num_splits; split += kWarp) {
      weights[split] = exp2f(weights[split] - max);
      total += weights[split];
    }
    total = WarpReduce(total, Add()) + SinkWeight(batch, row, max);
    __syncwarp();
    float sums[kChunks * kFeatureChunk / kWarp] = {};
    const float* mean = SplitMean(batch, 0, row);
    const int64_t next = batch.batch * batch.num_heads * batch.head_features;
    // The unrolled loop has several loads in flight, which hides their latency.
#pragma unroll 4
    for (int split = 0; split < work.num_splits; ++split, mean += next) {
      const float weight = weights[split];
      ForFeatures<kChunks>(
          batch, [&](int i, int c) { sums[i] += weight * __ldcg(mean + c); });
    }
    T* out = static_cast<T*>(batch.out_BHC) + row * batch.head_features;
    ForFeatures<kChunks>(
        batch, [&](int i, int c) { Store(sums[i] / total, out + c); });
  }
}

// Returns the address of the block's first query head.
template <typename T>
__device__ const T* QueryOf(const PagedAttentionBatch& batch,
                            const BlockWork& work) {
  const int64_t between =
      batch.q_stride == 0
          ? 0
          : batch.q_stride - batch.num_heads * batch.head_features;
  return static_cast<const T*>(batch.q_BHC) + work.row * batch.head_features +
         work.sequence * between;
}

// The fewest blocks per multiprocessor. This number leaves each thread enough
// registers for a step's keys and values.
template <typename T, int kChunks>
inline constexpr int kBlocksOnProcessor = sizeof(T) == 4 || kChunks > 2
                                              ? 2
                                              : (kChunks == 2 ? 3 : 4);

template <typename T, int kChunks, bool kWide>
__global__ void __launch_bounds__(kThreads, kBlocksOnProcessor<T, kChunks>)
    PagedAttentionKernel(PagedAttentionBatch batch) {
  __shared__ BlockMemory<T, kChunks> memory;
  BlockWork work = HeadsOfBlock(batch);
  WaitForEarlierLaunches();
  const int length = batch.lengths_B[work.sequence];
  // The grid has splits for the longest sequence that the table allows. If a
  // sequence has fewer splits, the blocks of the other splits end at once. The
  // first split always exists, so its block loads the query together with the
  // length.
  if (blockIdx.y > 0) {
    SetTokens(batch, length, &work);
    if (static_cast<int>(blockIdx.y) >= work.num_splits) return;
  }
  LoadQuery(QueryOf<T>(batch, work), work.num_heads,
            static_cast<int>(batch.head_features), &memory.query);
  if (blockIdx.y == 0) SetTokens(batch, length, &work);
  __syncthreads();
  WarpSums<T, kChunks, kWide> sums;
  sums.Add(batch, work, memory.query);
  // All threads wait here, because the sums reuse the query's memory.
  __syncthreads();
  PutSums(sums, &memory);
  __syncthreads();
  StoreBlock(batch, work, memory);
  if (work.num_splits == 1) return;
  if (!IsLastSplit(work.num_splits, &memory.is_last)) return;
  MergeSplits(batch, work, &memory);
}

// Returns whether loads of 16 bytes can read the rows of the pages.
template <typename T>
bool IsWide(const PagedAttentionBatch& batch) {
  const auto is_aligned = [](const void* data) {
    return reinterpret_cast<uintptr_t>(data) % sizeof(uint4) == 0;
  };
  return batch.head_features % kPiece == 0 && is_aligned(batch.k_pages_PSKC) &&
         is_aligned(batch.v_pages_PSKC);
}

template <typename T, int kChunks>
cudaError_t Run(const PagedAttentionBatch& batch, cudaStream_t stream) {
  const auto kernel = IsWide<T>(batch)
                          ? PagedAttentionKernel<T, kChunks, true>
                          : PagedAttentionKernel<T, kChunks, false>;
  return LaunchEarly(kernel, NumItems(batch), batch.splits.most, kThreads,
                     stream, batch);
}

template <typename T>
cudaError_t Run(const PagedAttentionBatch& batch, cudaStream_t stream) {
  switch (CeilDiv(batch.head_features, kFeatureChunk)) {
    case 1:
      return Run<T, 1>(batch, stream);
    case 2:
      return Run<T, 2>(batch, stream);
    case 3:
      return Run<T, 3>(batch, stream);
    default:
      return Run<T, 4>(batch, stream);
  }
}

}  // namespace

AttentionSplits ChooseAttentionSplits(const PagedAttentionBatch& batch) {
  const int64_t items = NumItems(batch);
  if (items == 0 || items > kMaxSplitItems) return {};
  int64_t longest = batch.table_entries * batch.page_tokens;
  if (batch.window > 0) longest = std::min(longest, batch.window);
  AttentionSplits splits = {.wanted = static_cast<int>(std::min<int64_t>(
                                CeilDiv(kWantedBlocks, items), kMaxSplits)),
                            .most = kMaxSplits};
  splits.most = std::max(1, NumSplits(splits, longest));
  return splits;
}

int64_t PagedAttentionWorkspace(const PagedAttentionBatch& batch) {
  if (batch.splits.most == 1) return 0;
  return batch.splits.most * batch.batch * batch.num_heads *
         (batch.head_features + 1);
}

cudaError_t PagedAttention(const PagedAttentionBatch& batch,
                           cudaStream_t stream) {
  const int splits = batch.splits.most;
  if (batch.head_features < 1 || batch.head_features > kMaxHeadFeatures ||
      splits < 1 || splits > kMaxSplits) {
    return cudaErrorInvalidValue;
  }
  if (batch.batch == 0 || batch.num_heads == 0) return cudaSuccess;
  if (splits > 1 && NumItems(batch) > kMaxSplitItems) {
    return cudaErrorInvalidValue;
  }
  return batch.dtype == DType::kBf16 ? Run<__nv_bfloat16>(batch, stream)
                                     : Run<float>(batch, stream);
}

}  // namespace weft::kernels::cuda
