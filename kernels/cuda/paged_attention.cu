#include <algorithm>
#include <cmath>

#include "kernels/cuda/paged_attention_step.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kNumWarps = kThreads / kWarp;
constexpr float kLog2E = 1.44269504F;
// The blocks that keep a device of 132 processors busy: two on each.
constexpr int64_t kWantedBlocks = 256;
// What an H100 showed: a split of fewer tokens costs more to start and to merge
// than it saves, one of more leaves a long sequence's last block on its own.
constexpr int kMinSplitTokens = 128;
constexpr int kMaxSplitTokens = 2048;
// Groups of query heads (grid.x) of a launch with splits.
constexpr int64_t kMaxSplitItems = 8192;

// How many splits of a group of heads have been added up to the workspace; 0
// between launches.
__device__ unsigned finished_splits[kMaxSplitItems];

// What one block computes.
struct BlockWork {
  int sequence;
  int kv_head;
  int64_t row;     // The first of its query heads, of those of all sequences.
  int num_heads;   // <= kStepHeads.
  int num_splits;  // That have tokens, and 1 for no tokens at all.
  int begin;       // Tokens.
  int end;
};

__host__ __device__ inline int HeadChunks(const PagedAttentionBatch& batch) {
  const int64_t group = batch.num_heads / batch.num_kv_heads;
  return static_cast<int>((group + kStepHeads - 1) / kStepHeads);
}

// Groups of heads: blocks of a launch without splits.
inline int64_t NumItems(const PagedAttentionBatch& batch) {
  return batch.batch * batch.num_kv_heads * HeadChunks(batch);
}

// Of a sequence that is seen for that many tokens; 0 for none.
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

// Of block (group of heads, split). Groups count chunks of a key/value head's
// query heads fastest, then key/value heads, then sequences. The length says
// into how many parts a sequence is split, so that a launch for any length may
// be queued before it is known.
__device__ BlockWork WorkOf(const PagedAttentionBatch& batch) {
  BlockWork work;
  const auto chunks = static_cast<unsigned>(HeadChunks(batch));
  const auto kv_heads = static_cast<unsigned>(batch.num_kv_heads);
  const auto group = static_cast<int>(batch.num_heads / batch.num_kv_heads);
  const int first = static_cast<int>(blockIdx.x % chunks) * kStepHeads;
  work.kv_head = static_cast<int>(blockIdx.x / chunks % kv_heads);
  work.sequence = static_cast<int>(blockIdx.x / chunks / kv_heads);
  work.row = work.sequence * batch.num_heads + work.kv_head * group + first;
  work.num_heads = group - first < kStepHeads ? group - first : kStepHeads;
  const int length = batch.lengths_B[work.sequence];
  const int hidden = batch.window > 0 && batch.window < length
                         ? length - static_cast<int>(batch.window)
                         : 0;
  const int steps = (length - hidden + kStepTokens - 1) / kStepTokens;
  const int num_splits = NumSplits(batch.splits, length - hidden);
  work.num_splits = num_splits < 1 ? 1 : num_splits;
  const auto bound = [&](int split) {
    const int64_t step = static_cast<int64_t>(steps) * split / work.num_splits;
    const int token = hidden + static_cast<int>(step) * kStepTokens;
    return token < length ? token : length;
  };
  const int split = static_cast<int>(blockIdx.y);
  work.begin = bound(split);
  work.end = bound(split + 1);
  return work;
}

// Running softmax of two query heads, in powers of 2. Each lane has the sums of
// its own tokens, g and g + 8 of every step.
struct RunningSoftmax {
  float max[2] = {kLowest, kLowest};
  float sum[2] = {};
};

// The combination of the lanes of equal t, in all of them.
template <typename Combine>
__device__ float ReduceTokens(float value, Combine combine) {
#pragma unroll
  for (int offset = 4; offset < kWarp; offset *= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// What turns products into powers of 2.
struct ScoreRule {
  float scale;
  float cap;  // 0: none.

  __device__ explicit ScoreRule(const PagedAttentionBatch& batch)
      : scale(batch.softcap > 0 ? batch.scale / batch.softcap
                                : batch.scale * kLog2E),
        cap(batch.softcap * kLog2E) {}
  __device__ float Of(float product) const {
    return cap > 0 ? cap * tanhf(product * scale) : product * scale;
  }
};

// Scores to weights; shrink: what earlier sums are multiplied by. num_tokens:
// those of the step that there are.
__device__ void Weigh(const ScoreRule& rule, int num_tokens,
                      RunningSoftmax* state, float (&scores)[4],
                      float (&shrink)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool is_token = Lane() / 4 + i / 2 * 8 < num_tokens;
    scores[i] = is_token ? rule.Of(scores[i]) : -INFINITY;
  }
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    const float top =
        fmaxf(state->max[head],
              ReduceTokens(fmaxf(scores[head], scores[2 + head]), Max()));
    shrink[head] = exp2f(state->max[head] - top);
    state->max[head] = top;
    scores[head] = exp2f(scores[head] - top);
    scores[2 + head] = exp2f(scores[2 + head] - top);
    state->sum[head] =
        state->sum[head] * shrink[head] + scores[head] + scores[2 + head];
  }
}

template <typename T, int kChunks>
struct BlockMemory {
  union {
    Query<T, kChunks> query;
    // Of each warp.
    alignas(16) float sums[kNumWarps][kStepHeads][kChunks * kChunk];
    // Of each split.
    float weights[kStepHeads][kMaxSplits];
  };
  float max[kNumWarps][kStepHeads];
  float sum[kNumWarps][kStepHeads];
  bool is_last;
};

// One warp's sums over every kNumWarps-th step of the block's tokens.
template <typename T, int kChunks, bool kWide>
struct WarpSums {
  static constexpr int kStride = kNumWarps * kStepTokens;

  RunningSoftmax state;
  float sums[kChunks][kPiece / 2][4] = {};

  __device__ void Add(const PagedAttentionBatch& batch, const BlockWork& work,
                      const Query<T, kChunks>& query) {
    const int first = work.begin + WarpIndex() * kStepTokens;
    if (first >= work.end) return;
    using StepKeys = Keys<T, kChunks, kWide>;
    using StepValues = Values<T, kChunks, kWide>;
    const LaneRows<T> k_rows(batch.k_pages_PSKC, batch, work.kv_head,
                             StepKeys::FirstFeature());
    const LaneRows<T> v_rows(batch.v_pages_PSKC, batch, work.kv_head,
                             StepValues::FirstFeature());
    const int32_t* pages =
        batch.page_table_BL + work.sequence * batch.table_entries;
    const auto page_tokens = static_cast<unsigned>(batch.page_tokens);
    // The slot of one token in each lane; past the last token, that one's.
    const auto slots_at = [&](int step) {
      const int ahead = step + Lane() % kStepTokens;
      const auto token =
          static_cast<unsigned>(ahead < work.end ? ahead : work.end - 1);
      return static_cast<unsigned>(pages[token / page_tokens]) * page_tokens +
             token % page_tokens;
    };
    const ScoreRule rule(batch);
    StepKeys keys;
    StepValues values;
    unsigned slots = slots_at(first);
    for (int step = first; step < work.end; step += kStride) {
      float scores[4];
      keys.Load(k_rows, slots);
      values.Load(v_rows, slots);
      slots = slots_at(step + kStride);
      keys.Score(query, scores);
      float shrink[2];
      Weigh(rule, work.end - step, &state, scores, shrink);
      Weights<T> weights;
      weights.Set(scores);
#pragma unroll
      for (auto& chunk : sums) {
#pragma unroll
        for (auto& pair : chunk) {
#pragma unroll
          for (int i = 0; i < 4; ++i) pair[i] *= shrink[i % 2];
        }
      }
      values.AddTo(weights, sums);
    }
  }

  // To the block's memory, for all warps to read after a barrier.
  __device__ void Put(BlockMemory<T, kChunks>* memory) const {
    const int warp = WarpIndex();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int head = Lane() % 4 * 2 + i;
      const float sum = ReduceTokens(state.sum[i], cuda::Add());
      if (Lane() / 4 == 0) {
        memory->max[warp][head] = state.max[i];
        memory->sum[warp][head] = sum;
      }
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
        float* to = &memory->sums[warp][head][j * kChunk + Lane() / 4 * kPiece];
#pragma unroll
        for (int m = 0; m < kPiece / 2; m += 2) {
          *reinterpret_cast<uint4*>(to + 2 * m) = {
              __float_as_uint(sums[j][m][i]),
              __float_as_uint(sums[j][m][2 + i]),
              __float_as_uint(sums[j][m + 1][i]),
              __float_as_uint(sums[j][m + 1][2 + i])};
        }
      }
    }
  }
};

// Where a split of a row waits for its merge: all splits' means, then all
// splits' log-sum-exps, in powers of 2.
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

// The warps' sums to the output, or to the workspace where others follow.
template <typename T, int kChunks>
__device__ void StoreBlock(const PagedAttentionBatch& batch,
                           const BlockWork& work,
                           const BlockMemory<T, kChunks>& memory) {
  const auto features = static_cast<int>(batch.head_features);
  const auto split = static_cast<int>(blockIdx.y);
  for (int i = static_cast<int>(threadIdx.x); i < work.num_heads * features;
       i += kThreads) {
    const int head = i / features;
    const int c = i % features;
    float top = kLowest;
    for (int w = 0; w < kNumWarps; ++w) top = fmaxf(top, memory.max[w][head]);
    float total = 0;
    float value = 0;
    for (int w = 0; w < kNumWarps; ++w) {
      const float shrink = exp2f(memory.max[w][head] - top);
      total += memory.sum[w][head] * shrink;
      value += memory.sums[w][head][c] * shrink;
    }
    const float mean = work.begin < work.end ? value / total : 0.0F;
    if (work.num_splits == 1) {
      Store(mean,
            static_cast<T*>(batch.out_BHC) + (work.row + head) * features + c);
      continue;
    }
    SplitMean(batch, split, work.row + head)[c] = mean;
    if (c == 0) *SplitLse(batch, split, work.row + head) = top + log2f(total);
  }
}

// True in all threads of the last block of its group of heads to come here.
__device__ bool IsLastSplit(int num_splits, bool* is_last) {
  // What the block wrote is there for the one that counts it.
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const auto last = static_cast<unsigned>(num_splits - 1);
    // Back to 0 with the last.
    *is_last = atomicInc(&finished_splits[blockIdx.x], last) == last;
    __threadfence();
  }
  __syncthreads();
  return *is_last;
}

// The splits of the block's heads, in their order, to the output.
template <typename T, int kChunks>
__device__ void MergeSplits(const PagedAttentionBatch& batch,
                            const BlockWork& work,
                            BlockMemory<T, kChunks>* memory) {
  for (int head = WarpIndex(); head < work.num_heads; head += kNumWarps) {
    float max = kLowest;
    for (int split = Lane(); split < work.num_splits; split += kWarp) {
      const float lse = __ldcg(SplitLse(batch, split, work.row + head));
      memory->weights[head][split] = lse;
      max = fmaxf(max, lse);
    }
    max = WarpReduce(max, Max());
    float total = 0;
    for (int split = Lane(); split < work.num_splits; split += kWarp) {
      float& weight = memory->weights[head][split];
      weight = exp2f(weight - max);
      total += weight;
    }
    total = WarpReduce(total, Add());
    if (Lane() == 0) memory->sum[0][head] = total;
  }
  __syncthreads();
  const auto features = static_cast<int>(batch.head_features);
  for (int i = static_cast<int>(threadIdx.x); i < work.num_heads * features;
       i += kThreads) {
    const int head = i / features;
    const int c = i % features;
    float value = 0;
#pragma unroll 8
    for (int split = 0; split < work.num_splits; ++split) {
      value += memory->weights[head][split] *
               __ldcg(SplitMean(batch, split, work.row + head) + c);
    }
    Store(value / memory->sum[0][head],
          static_cast<T*>(batch.out_BHC) + (work.row + head) * features + c);
  }
}

// The first of the block's query heads.
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

// At least, which bounds the registers: as many as hold a step's keys and
// values.
template <typename T, int kChunks>
inline constexpr int kBlocksOnProcessor = sizeof(T) == 4 || kChunks > 2
                                              ? 2
                                              : (kChunks == 2 ? 3 : 4);

template <typename T, int kChunks, bool kWide>
__global__ void __launch_bounds__(kThreads, kBlocksOnProcessor<T, kChunks>)
    PagedAttentionKernel(PagedAttentionBatch batch) {
  __shared__ BlockMemory<T, kChunks> memory;
  const BlockWork work = WorkOf(batch);
  if (static_cast<int>(blockIdx.y) >= work.num_splits) return;
  LoadQuery(QueryOf<T>(batch, work), work.num_heads,
            static_cast<int>(batch.head_features), &memory.query);
  __syncthreads();
  WarpSums<T, kChunks, kWide> sums;
  sums.Add(batch, work, memory.query);
  // The sums take the place of the query.
  __syncthreads();
  sums.Put(&memory);
  __syncthreads();
  StoreBlock(batch, work, memory);
  if (work.num_splits == 1) return;
  if (!IsLastSplit(work.num_splits, &memory.is_last)) return;
  MergeSplits(batch, work, &memory);
}

// Whether rows of C features from `data` on are of whole loads of 16 bytes.
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
  return Launch(kernel, NumItems(batch), batch.splits.most, kThreads, stream,
                batch);
}

template <typename T>
cudaError_t Run(const PagedAttentionBatch& batch, cudaStream_t stream) {
  switch (CeilDiv(batch.head_features, kChunk)) {
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
