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

// The most taps of the convolution.
inline constexpr int kMaxDeltaMixTaps = 8;

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

// Writes q, k and v in `dtype` and the gates of the rule in f32, all without
// gaps. Reads (R + 1) W and writes W numbers for each row; the R rows before
// are in the L2 cache. Reads 16 bytes at a time if the rows and heads allow it
// and there are four taps.
// Source: reference::MixRow.   Errors: also more than kMaxDeltaMixTaps taps.
[[nodiscard]] cudaError_t MixDeltaRows(const DeltaMixRows& rows, void* mixed_TW,
                                       float* beta_TH, float* g_TH,
                                       cudaStream_t stream);

// Replaces d [T, W], the gradients of q, k and v, by those of the convolution.
[[nodiscard]] cudaError_t MixDeltaRowsBackward(const DeltaMixRows& rows,
                                               float* d_TW,
                                               cudaStream_t stream);

// A row whose convolution reads another row as its tap.
struct DeltaLaterRow {
  int32_t row = 0;
  int32_t tap = 0;
};

// The rows that read a row: those of row t are later[offsets[t]] to
// later[offsets[t + 1] - 1].
struct DeltaLaterRows {
  const int64_t* offsets = nullptr;  // [T + 1].
  const DeltaLaterRow* later = nullptr;
};

// Writes the gradients of x, given those of the convolution. Adds up the rows
// that read a row in their order.
[[nodiscard]] cudaError_t DeltaConvBackward(const DeltaMixRows& rows,
                                            const DeltaLaterRows& later,
                                            const float* d_TW, void* dx_TW,
                                            int64_t dx_stride,
                                            cudaStream_t stream);

// The rows of the rule without gaps. q, k and v have the dtype of the outputs,
// so that the chunks and the step see the same numbers.
struct DeltaRuleRows {
  const void* mixed_TW = nullptr;
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
// each state once: 8 K V bytes, and 6 K V operations, for each head. Rows of
// `padding_slot` have no sequence: their out is 0, and they leave the state.
[[nodiscard]] cudaError_t DeltaStep(const DeltaRuleRows& rows, int64_t num_rows,
                                    const int64_t* slots_T,
                                    int64_t padding_slot, float* state_NHKV,
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
  int64_t num_chunks = 0;
};

// Returns whether RunDeltaChunks and its backward pass take these heads.
constexpr bool TakesDeltaChunks(int64_t key_features, int64_t value_features) {
  return key_features == 128 && value_features % 64 == 0;
}

// What a chunk's rows give each value head without any state, in bf16: W and
// (I + A)^-1 of src/ops/delta_chunks.h. Row t has the columns of its chunk. The
// inverse is the sum of two matrices. One alone would be wrong in silence: rows
// of a token that repeats have equal entries, whose roundings add up over a
// chunk (0.1 of a row of out).
struct DeltaScores {
  void* w_HTC = nullptr;
  void* inverse_HTC = nullptr;
  void* rest_HTC = nullptr;  // What rounding leaves of the inverse.
  int64_t num_rows = 0;      // T.
};

// Fills the scores of all chunks at once. A block computes a chunk of one value
// head: 2.1 MFLOP, 32 KB of q and k, of which the L2 cache has most, and 24 KB
// of scores. Inverts 16 x 16 blocks on the diagonal in f32, and then the blocks
// below it.
[[nodiscard]] cudaError_t ScoreDeltaChunks(const DeltaRuleRows& rows,
                                           const DeltaTrees& trees,
                                           const DeltaScores& to,
                                           cudaStream_t stream);

struct DeltaChunksOutput {
  float* states_SHKV = nullptr;
  void* u_THV = nullptr;    // bf16. Null: not wanted.
  void* out_THV = nullptr;  // bf16.
};

// Computes the rule in chunks on tensor cores, with bf16 operands, f32 sums and
// f32 states. Reads and writes states [S, H, K, V] by the chunks. A block
// computes 64 value features of one head of one tree, and keeps the state in
// registers from a chunk to the one that follows it. A chunk takes it 4.7 MFLOP
// (the products take 2 C (3 K 64 + 3 C 64)) and 112 KB: q, k, v, the scores, u,
// out and the end state. All matrices begin at multiples of 16 bytes.
// Source: src/ops/delta_chunks.h.
[[nodiscard]] cudaError_t RunDeltaChunks(const DeltaRuleRows& rows,
                                         const DeltaTrees& trees,
                                         const DeltaScores& scores,
                                         const DeltaChunksOutput& to,
                                         cudaStream_t stream);

// The trees of a backward pass have one state for each node, which each chunk
// of the node replaces.
struct DeltaChunksGradient {
  // The same chunks with the states of the forward pass, one for each chunk.
  const DeltaChunkRange* kept_chunks = nullptr;
  const float* states_SHKV = nullptr;  // Of the forward pass.
  const void* u_THV = nullptr;         // bf16, like dout.
  const void* dout_THV = nullptr;
  // The gradients of the nodes' states; zeros before the call.
  float* dstates_SHKV = nullptr;
  // In bf16, for the rows' gradients: those of the states of the forward pass,
  // and those of diag(beta) (V - ...).
  void* dstops_SHKV = nullptr;
  void* dr_THV = nullptr;
  // Sums over 64 value features each, [V / 64, T, H, ...]. The caller adds them
  // up, and the heads that share a key head.
  float* dq = nullptr;     // [V / 64, T, H, K].
  float* dk = nullptr;     // [V / 64, T, H, K].
  float* dbeta = nullptr;  // [V / 64, T, H].
  float* dg = nullptr;     // [V / 64, T, H].
  float* dv_THV = nullptr;
};

// Writes the gradients of states and values: dv, dr and dstops. A block
// computes a tree's chunks in reverse order. A chunk takes it 4.7 MFLOP (the
// products take 2 C (3 K 64 + 3 C 64)) and 104 KB.
[[nodiscard]] cudaError_t RunDeltaStatesBackward(
    const DeltaRuleRows& rows, const DeltaTrees& trees,
    const DeltaScores& scores, const DeltaChunksGradient& gradient,
    cudaStream_t stream);

// Then writes the gradients of q, k, beta and g, of all chunks at once. A block
// computes a chunk of 64 value features of one head: 9.4 MFLOP (the products
// take 2 C (5 C K + 3 K 64 + 2 C 64)) and 184 KB.
[[nodiscard]] cudaError_t RunDeltaRowsBackward(
    const DeltaRuleRows& rows, const DeltaTrees& trees,
    const DeltaScores& scores, const DeltaChunksGradient& gradient,
    cudaStream_t stream);

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
