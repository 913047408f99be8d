// The gated delta rule: the rows before it, its chunks and its step, and the
// gated norm after it.
//
// Legend: that of src/ops/gated_delta.h, and C rows of a chunk. Strides count
// elements.
#ifndef WEFT_KERNELS_CUDA_DELTA_GATED_DELTA_H_
#define WEFT_KERNELS_CUDA_DELTA_GATED_DELTA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernels/cuda/dtype.h"

namespace weft::kernels::cuda {

// All functions queue their work on `stream`, and nothing waits for it.
// Errors:  those of the launch.   Threads: any.

// Rows before the rule, and what their convolution reads.
struct DeltaMixRows {
  DType dtype = DType::kF32;         // Of x, history, beta and alpha.
  DType weight_dtype = DType::kF32;  // Equal to `dtype`, or f32.
  int64_t num_rows = 0;              // T.
  int64_t num_features = 0;          // W.
  int64_t num_taps = 0;              // R + 1.
  int64_t num_key_heads = 0;         // J.
  int64_t key_features = 0;          // K.
  int64_t num_value_heads = 0;       // H.
  float l2_eps = 0;
  float query_scale = 1;
  const void* x_TW = nullptr;
  int64_t x_stride = 0;
  // [T, R]: the rows before each row, as in ops::DeltaPlan: a row of x, -1 for
  // zeros, or T + i for row i of the history. Null: row t reads the rows
  // [t R, t R + R) of the history.
  const int64_t* earlier_TR = nullptr;
  const void* history_W = nullptr;  // Rows [W] without gaps.
  const void* weight_RW = nullptr;  // [R + 1, W] without gaps.
  const void* bias_W = nullptr;     // Null: zeros.
  const void* beta_TH = nullptr;
  int64_t beta_stride = 0;
  const void* alpha_TH = nullptr;
  int64_t alpha_stride = 0;
  const float* a_log_H = nullptr;
  const float* dt_bias_H = nullptr;
};

// Writes q, k, v and the gates of the rule, in f32 without gaps. Reads (R + 1)
// W and writes W numbers for each row; the R rows before are in the L2 cache.
// Source: reference::MixRow.
[[nodiscard]] cudaError_t MixDeltaRows(const DeltaMixRows& rows,
                                       float* mixed_TW, float* beta_TH,
                                       float* g_TH, cudaStream_t stream);

// Replaces d [T, W], the gradients of q, k and v, by those of the convolution.
[[nodiscard]] cudaError_t MixDeltaRowsBackward(const DeltaMixRows& rows,
                                               float* d_TW,
                                               cudaStream_t stream);

// The rows that read a row: those of row t are later[offsets[t]] to
// later[offsets[t + 1] - 1]. An element is (R + 1) * row + tap.
struct DeltaLaterRows {
  const int64_t* offsets = nullptr;  // [T + 1].
  const int64_t* later = nullptr;
};

// Writes the gradients of x, given those of the convolution. Adds up the rows
// that read a row in their order.
[[nodiscard]] cudaError_t DeltaConvBackward(const DeltaMixRows& rows,
                                            const DeltaLaterRows& later,
                                            const float* d_TW, void* dx_TW,
                                            int64_t dx_stride,
                                            cudaStream_t stream);

// The rows of the rule, in f32 without gaps.
struct DeltaRuleRows {
  const float* mixed_TW = nullptr;
  const float* beta_TH = nullptr;
  const float* g_TH = nullptr;
  int64_t num_key_heads = 0;    // J.
  int64_t num_value_heads = 0;  // H.
  int64_t key_features = 0;     // K.
  int64_t value_features = 0;   // V.
};

// The most key features of DeltaStep.
inline constexpr int64_t kMaxDeltaStepKeys = 128;

// Computes one row of each of num_rows sequences, and replaces its state in
// state_NHKV at its slot. Writes out [T, H, V] in `dtype`. Reads and writes
// each state once: 8 K V bytes, and 6 K V operations, for each head.
[[nodiscard]] cudaError_t DeltaStep(const DeltaRuleRows& rows, int64_t num_rows,
                                    const int64_t* slots_T, float* state_NHKV,
                                    DType dtype, void* out,
                                    cudaStream_t stream);

// Rows [begin, end) of a node, at most 64. `start` and `stop` are indices of
// the states before and after them; -1: zeros, or not needed.
struct DeltaChunkRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t start = -1;
  int64_t stop = -1;
};

// The chunks of prefix trees. Tree i has the chunks [tree_chunks[i],
// tree_chunks[i + 1]), in the order of their rows.
struct DeltaTrees {
  const DeltaChunkRange* chunks = nullptr;
  const int64_t* tree_chunks = nullptr;
  int64_t num_trees = 0;
};

// Returns whether RunDeltaChunks and its backward pass take these heads.
constexpr bool TakesDeltaChunks(int64_t key_features, int64_t value_features) {
  return key_features == 128 && value_features % 64 == 0;
}

// Returns the bytes of shared memory that a block of the backward pass takes.
// One of the forward pass takes less.
int64_t DeltaChunksSharedBytes();

// Computes the rule in chunks on tensor cores, with bf16 operands, f32 sums and
// f32 states. Writes out [T, H, V] in bf16 and, if u is not null, u [T, H, V].
// Reads and writes states [S, H, K, V] by the chunks. A block computes 64 value
// features of one head of one tree. A chunk takes it 5.9 MFLOP (the products
// take 2 C (2 C K + 3 K 64 + C 64)) and 200 KB: q, k, v, the start state twice,
// u, out and the end state.
// Source: src/ops/delta_chunks.h.
[[nodiscard]] cudaError_t RunDeltaChunks(const DeltaRuleRows& rows,
                                         const DeltaTrees& trees,
                                         float* states_SHKV, float* u_THV,
                                         void* out_THV, cudaStream_t stream);

struct DeltaChunksGradient {
  const float* states_SHKV = nullptr;  // Of the forward pass.
  const float* u_THV = nullptr;
  const void* dout_THV = nullptr;  // bf16, without gaps.
  // The states before each chunk, by the indices of the forward pass.
  const int64_t* starts = nullptr;
  // The gradients of states, by the chunks' indices; zeros before the call.
  float* dstates_SHKV = nullptr;
  // Sums over 64 value features each, [V / 64, T, H, ...]. The caller adds them
  // up, and the heads that share a key head.
  float* dq = nullptr;     // [V / 64, T, H, K].
  float* dk = nullptr;     // [V / 64, T, H, K].
  float* dbeta = nullptr;  // [V / 64, T, H].
  float* dg = nullptr;     // [V / 64, T, H].
  float* dv_THV = nullptr;
  int64_t num_rows = 0;  // T.
};

// Writes the gradients of the rows. A chunk takes a block 14.4 MFLOP (the
// products take 2 C (6 C K + 6 K 64 + 3 C 64)) and 400 KB: what the forward
// pass moves, and dout, the gradients of both states, q, k and v.
[[nodiscard]] cudaError_t RunDeltaChunksBackward(
    const DeltaRuleRows& rows, const DeltaTrees& trees,
    const DeltaChunksGradient& gradient, cudaStream_t stream);

// Heads [T, H, V] whose features are adjacent.
struct DeltaHeads {
  void* data = nullptr;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

struct GatedNormHeads {
  DType dtype = DType::kF32;         // Of all heads.
  DType weight_dtype = DType::kF32;  // Equal to `dtype`, or f32.
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t features = 0;
  float eps = 0;
  DeltaHeads x;
  DeltaHeads z;
  const void* weight_V = nullptr;
};

// Computes y = weight x / rms(x) silu(z) for each head.
// Source: reference::GatedNormRow.
[[nodiscard]] cudaError_t GatedNorm(const GatedNormHeads& heads,
                                    const DeltaHeads& y, cudaStream_t stream);

// Writes the gradients of x and z.
[[nodiscard]] cudaError_t GatedNormBackward(const GatedNormHeads& heads,
                                            const DeltaHeads& dy,
                                            const DeltaHeads& dx,
                                            const DeltaHeads& dz,
                                            cudaStream_t stream);

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_DELTA_GATED_DELTA_H_
