#include <algorithm>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/paged_attention.h"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kNumWarps = kThreads / kWarp;
// Tokens of a step: one per lane when scores are formed.
constexpr int kTokens = kWarp;
// Query heads of a block: those of one key/value head, in chunks.
constexpr int kHeads = 8;
constexpr int kMaxSplits = 1024;
// Blocks that keep every processor of today's devices busy, tokens that are
// worth a split of their own, and splits beyond which merging costs more.
constexpr int64_t kWantedBlocks = 264;
constexpr int64_t kMinSplitTokens = 256;
constexpr int64_t kMaxWantedSplits = 64;

// What one block computes.
struct BlockWork {
  int64_t sequence;
  int64_t kv_head;
  int64_t first_head;  // Of the sequence's query heads.
  int num_heads;       // <= kHeads.
  int split;
  int64_t begin;  // Tokens.
  int64_t end;
};

__host__ __device__ inline int64_t HeadChunks(
    const PagedAttentionBatch& batch) {
  const int64_t group = batch.num_heads / batch.num_kv_heads;
  return (group + kHeads - 1) / kHeads;
}

// Blocks count splits fastest, then chunks of heads, key/value heads,
// sequences.
__device__ BlockWork WorkOf(const PagedAttentionBatch& batch, int64_t index) {
  BlockWork work;
  work.split = static_cast<int>(index % batch.num_splits);
  index /= batch.num_splits;
  const int64_t chunks = HeadChunks(batch);
  const int64_t first = index % chunks * kHeads;
  index /= chunks;
  work.kv_head = index % batch.num_kv_heads;
  work.sequence = index / batch.num_kv_heads;
  const int64_t group = batch.num_heads / batch.num_kv_heads;
  work.first_head = work.kv_head * group + first;
  work.num_heads =
      static_cast<int>(group - first < kHeads ? group - first : kHeads);
  const int64_t length = batch.lengths_B[work.sequence];
  const int64_t hidden =
      batch.window > 0 && batch.window < length ? length - batch.window : 0;
  const int64_t seen = length - hidden;
  work.begin = hidden + seen * work.split / batch.num_splits;
  work.end = hidden + seen * (work.split + 1) / batch.num_splits;
  return work;
}

// The memory of a block. kFeatures is the least of 64, 128, 256 that holds C.
template <int kFeatures>
struct BlockMemory {
  float q[kHeads][kFeatures];
  // One more column, so that lanes at one feature of all tokens meet no bank
  // twice.
  float keys[kTokens][kFeatures + 1];
  float weights[kHeads][kTokens];
  float shrink[kHeads];         // What earlier sums are multiplied by.
  int64_t row_offset[kTokens];  // Of the tokens' rows in the pages.
};

// Running softmax of one query head.
struct RunningSoftmax {
  float max = kLowest;
  float sum = 0;
};

// Keys of the tokens [begin, begin + count) and where their rows are.
template <typename T, int kFeatures>
__device__ void LoadKeys(const PagedAttentionBatch& batch,
                         const BlockWork& work, int64_t begin, int count,
                         BlockMemory<kFeatures>* memory) {
  if (static_cast<int>(threadIdx.x) < count) {
    const int64_t token = begin + threadIdx.x;
    const int64_t page =
        batch.page_table_BL[work.sequence * batch.table_entries +
                            token / batch.page_tokens];
    memory->row_offset[threadIdx.x] =
        ((page * batch.page_tokens + token % batch.page_tokens) *
             batch.num_kv_heads +
         work.kv_head) *
        batch.head_features;
  }
  __syncthreads();
  const T* keys = static_cast<const T*>(batch.k_pages_PSKC);
  for (int t = WarpIndex(); t < count; t += kNumWarps) {
    for (int c = Lane(); c < batch.head_features; c += kWarp) {
      memory->keys[t][c] = ToFloat(keys[memory->row_offset[t] + c]);
    }
  }
  __syncthreads();
}

// The weights of the tokens for the heads of this warp.
template <int kFeatures>
__device__ void WeighTokens(const PagedAttentionBatch& batch, int num_heads,
                            int count, BlockMemory<kFeatures>* memory,
                            RunningSoftmax* states) {
  const int features = static_cast<int>(batch.head_features);
#pragma unroll
  for (int i = 0; i < kHeads / kNumWarps; ++i) {
    const int head = WarpIndex() + i * kNumWarps;
    if (head >= num_heads) break;
    const bool is_token = Lane() < count;
    float score = -INFINITY;
    if (is_token) {
      float dot = 0;
      for (int c = 0; c < features; ++c) {
        dot += memory->q[head][c] * memory->keys[Lane()][c];
      }
      score = dot * batch.scale;
      if (batch.softcap > 0) {
        score = batch.softcap * tanhf(score / batch.softcap);
      }
    }
    RunningSoftmax& state = states[i];
    const float max = fmaxf(state.max, WarpReduce(score, Max()));
    const float shrink = expf(state.max - max);
    const float weight = is_token ? expf(score - max) : 0.0F;
    state.sum = state.sum * shrink + WarpReduce(weight, Add());
    state.max = max;
    memory->weights[head][Lane()] = weight;
    if (Lane() == 0) memory->shrink[head] = shrink;
  }
  __syncthreads();
}

// Where a part of a split sequence waits for its merge: all parts' sums, then
// all parts' log-sum-exps.
__device__ float* PartOut(const PagedAttentionBatch& batch, int split,
                          int64_t row) {
  return batch.workspace +
         (split * batch.batch * batch.num_heads + row) * batch.head_features;
}
__device__ float* PartLse(const PagedAttentionBatch& batch, int split,
                          int64_t row) {
  const int64_t rows = batch.batch * batch.num_heads;
  return batch.workspace + batch.num_splits * rows * batch.head_features +
         split * rows + row;
}

template <typename T, int kFeatures>
__global__ void __launch_bounds__(kThreads)
    PagedAttentionKernel(PagedAttentionBatch batch) {
  constexpr int kColumns = (kFeatures + kThreads - 1) / kThreads;
  __shared__ BlockMemory<kFeatures> memory;
  const BlockWork work = WorkOf(batch, blockIdx.x);
  const int features = static_cast<int>(batch.head_features);
  const int64_t row = work.sequence * batch.num_heads + work.first_head;
  const T* q = static_cast<const T*>(batch.q_BHC) + row * features;
  for (int i = static_cast<int>(threadIdx.x); i < work.num_heads * features;
       i += kThreads) {
    memory.q[i / features][i % features] = ToFloat(q[i]);
  }
  // A warp has the softmax of its heads, a thread the sums of its columns.
  RunningSoftmax states[kHeads / kNumWarps];
  float sums[kColumns][kHeads] = {};
  for (int64_t token = work.begin; token < work.end; token += kTokens) {
    const int count = static_cast<int>(
        work.end - token < kTokens ? work.end - token : kTokens);
    LoadKeys<T>(batch, work, token, count, &memory);
    WeighTokens(batch, work.num_heads, count, &memory, states);
    const T* values = static_cast<const T*>(batch.v_pages_PSKC);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int c = static_cast<int>(threadIdx.x) + i * kThreads;
      if (c >= features) break;
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        if (head < work.num_heads) sums[i][head] *= memory.shrink[head];
      }
      for (int t = 0; t < count; ++t) {
        const float value = ToFloat(values[memory.row_offset[t] + c]);
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          if (head < work.num_heads) {
            sums[i][head] += memory.weights[head][t] * value;
          }
        }
      }
    }
    // Before the next tokens' rows and weights overwrite these.
    __syncthreads();
  }
  // Where all threads read the sums of all heads.
#pragma unroll
  for (int i = 0; i < kHeads / kNumWarps; ++i) {
    const int head = WarpIndex() + i * kNumWarps;
    if (head >= work.num_heads || Lane() != 0) break;
    memory.shrink[head] = states[i].sum;
    if (batch.num_splits > 1) {
      *PartLse(batch, work.split, row + head) =
          work.begin < work.end ? states[i].max + logf(states[i].sum)
                                : -INFINITY;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int c = static_cast<int>(threadIdx.x) + i * kThreads;
    if (c >= features || work.begin == work.end) break;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      if (head >= work.num_heads) break;
      const float out = sums[i][head] / memory.shrink[head];
      if (batch.num_splits > 1) {
        PartOut(batch, work.split, row + head)[c] = out;
      } else {
        Store(out,
              static_cast<T*>(batch.out_BHC) + (row + head) * features + c);
      }
    }
  }
}

// Block: one row (sequence, head). Parts of lse -inf have no tokens.
template <typename T>
__global__ void MergePartsKernel(PagedAttentionBatch batch) {
  const int64_t row = blockIdx.x;
  float max = kLowest;
  for (int split = 0; split < batch.num_splits; ++split) {
    max = fmaxf(max, *PartLse(batch, split, row));
  }
  float total = 0;
  for (int split = 0; split < batch.num_splits; ++split) {
    total += expf(*PartLse(batch, split, row) - max);
  }
  T* out = static_cast<T*>(batch.out_BHC) + row * batch.head_features;
  for (int64_t c = threadIdx.x; c < batch.head_features; c += blockDim.x) {
    float sum = 0;
    for (int split = 0; split < batch.num_splits; ++split) {
      const float lse = *PartLse(batch, split, row);
      if (lse == -INFINITY) continue;
      sum += expf(lse - max) * PartOut(batch, split, row)[c];
    }
    Store(sum / total, out + c);
  }
}

template <typename T>
cudaError_t Run(const PagedAttentionBatch& batch, cudaStream_t stream) {
  const auto kernel =
      batch.head_features <= 64
          ? PagedAttentionKernel<T, 64>
          : (batch.head_features <= 128 ? PagedAttentionKernel<T, 128>
                                        : PagedAttentionKernel<T, 256>);
  const int64_t blocks =
      batch.batch * batch.num_kv_heads * HeadChunks(batch) * batch.num_splits;
  const cudaError_t status = Launch(kernel, blocks, 1, kThreads, stream, batch);
  if (status != cudaSuccess || batch.num_splits == 1) return status;
  return Launch(MergePartsKernel<T>, batch.batch * batch.num_heads, 1,
                RowThreads(batch.head_features), stream, batch);
}

}  // namespace

int PagedAttentionSplits(const PagedAttentionBatch& batch) {
  int64_t longest = batch.table_entries * batch.page_tokens;
  if (batch.window > 0) longest = std::min(longest, batch.window);
  const int64_t items = batch.batch * batch.num_kv_heads;
  if (items == 0) return 1;
  const int64_t wanted = (kWantedBlocks + items - 1) / items;
  return static_cast<int>(std::clamp<int64_t>(
      std::min(longest / kMinSplitTokens, wanted), 1, kMaxWantedSplits));
}

int64_t PagedAttentionWorkspace(const PagedAttentionBatch& batch) {
  if (batch.num_splits == 1) return 0;
  return batch.num_splits * batch.batch * batch.num_heads *
         (batch.head_features + 1);
}

cudaError_t PagedAttention(const PagedAttentionBatch& batch,
                           cudaStream_t stream) {
  if (batch.head_features < 1 || batch.head_features > kMaxHeadFeatures ||
      batch.num_splits < 1 || batch.num_splits > kMaxSplits) {
    return cudaErrorInvalidValue;
  }
  if (batch.batch == 0 || batch.num_heads == 0) return cudaSuccess;
  return batch.dtype == DType::kBf16 ? Run<__nv_bfloat16>(batch, stream)
                                     : Run<float>(batch, stream);
}

}  // namespace weft::kernels::cuda
