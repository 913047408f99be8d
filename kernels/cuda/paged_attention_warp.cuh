// The work of one warp in paged attention: softmax and sums over its steps of
// kStepTokens tokens.
#ifndef WEFT_KERNELS_CUDA_PAGED_ATTENTION_WARP_CUH_
#define WEFT_KERNELS_CUDA_PAGED_ATTENTION_WARP_CUH_

#include "kernels/cuda/paged_attention_keys.cuh"
#include "kernels/cuda/paged_attention_softmax.cuh"
#include "kernels/cuda/paged_attention_values.cuh"

namespace weft::kernels::cuda {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kAttentionWarps = kAttentionThreads / kWarp;

// The work of one block: some query heads, and the tokens [begin, end).
struct BlockWork {
  int sequence;
  int kv_head;
  int64_t row;     // First query head of the block, counted over all sequences.
  int num_heads;   // At most kStepHeads.
  int num_splits;  // Number of splits that have tokens; at least 1.
  int begin;
  int end;
};

// One warp's sums. The warp takes every kAttentionWarps-th step of the block's
// tokens.
template <typename T, int kChunks, bool kWide>
struct WarpSums {
  static constexpr int kStride = kAttentionWarps * kStepTokens;

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
    // Returns the slot of one token for each lane. Lanes beyond the last token
    // get the slot of the last token.
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
};

// The shared memory of a block. The query, the warps' sums and the splits'
// weights use the same memory one after another.
template <typename T, int kChunks>
struct BlockMemory {
  union {
    Query<T, kChunks> query;
    // Each warp's sums of weighted values.
    alignas(
        16) float sums[kAttentionWarps][kStepHeads][kChunks * kFeatureChunk];
    // The weights of the splits in MergeSplits.
    float weights[kStepHeads][kMaxSplits];
  };
  float max[kAttentionWarps][kStepHeads];
  float sum[kAttentionWarps][kStepHeads];
  bool is_last;
};

// Writes the warp's sums to the block's memory. A barrier must follow before
// other warps read them.
template <typename T, int kChunks, bool kWide>
__device__ void PutSums(const WarpSums<T, kChunks, kWide>& warp_sums,
                        BlockMemory<T, kChunks>* memory) {
  const auto& sums = warp_sums.sums;
  const RunningSoftmax& state = warp_sums.state;
  const int warp = WarpIndex();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = Lane() % 4 * 2 + i;
    const float sum = ReduceTokens(state.sum[i], Add());
    if (Lane() / 4 == 0) {
      memory->max[warp][head] = state.max[i];
      memory->sum[warp][head] = sum;
    }
#pragma unroll
    for (int j = 0; j < kChunks; ++j) {
      float* to =
          &memory->sums[warp][head][j * kFeatureChunk + Lane() / 4 * kPiece];
#pragma unroll
      for (int m = 0; m < kPiece / 2; m += 2) {
        *reinterpret_cast<uint4*>(to + 2 * m) = {
            __float_as_uint(sums[j][m][i]), __float_as_uint(sums[j][m][2 + i]),
            __float_as_uint(sums[j][m + 1][i]),
            __float_as_uint(sums[j][m + 1][2 + i])};
      }
    }
  }
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_PAGED_ATTENTION_WARP_CUH_
