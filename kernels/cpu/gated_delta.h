// Arguments of the kernels of the gated delta rule; see kernels.h. The formulas
// are in src/ops/gated_delta.h and src/ops/delta_chunks.h.
//
// Legend: W features of a row (2 J K + H V: q | k | v), J key heads, H value
// heads, K key features, V value features, C rows of a chunk. Strides count
// elements.
#ifndef WEFT_KERNELS_CPU_GATED_DELTA_H_
#define WEFT_KERNELS_CPU_GATED_DELTA_H_

#include <cstdint>

#include "kernels/cpu/panel_product.h"

namespace weft::kernels::cpu {

// The most rows of a chunk.
inline constexpr int64_t kDeltaChunkRows = 64;
// The largest kernel of the convolution.
inline constexpr int64_t kMaxDeltaTaps = 8;

// One row before the rule: a causal convolution of each feature, silu, and the
// l2 norm of the heads of q and k.
struct DeltaMixRow {
  // The rows [W] that the convolution reads, the row itself last; null: zeros.
  const float* taps[kMaxDeltaTaps] = {};
  int64_t num_taps = 0;
  const float* weights = nullptr;  // [num_taps, W], contiguous.
  const float* bias = nullptr;     // [W], or null.
  int64_t num_features = 0;        // W.
  int64_t num_key_heads = 0;       // J.
  int64_t key_features = 0;        // K.
  float l2_eps = 0;
  float query_scale = 1;  // Multiplies q after its norm.
};

// The rows of one head in one chunk, and the state before them.
struct DeltaChunkRows {
  const float* q = nullptr;  // [C, K].
  const float* k = nullptr;  // [C, K].
  const float* v = nullptr;  // [C, V].
  int64_t row_stride = 0;
  const float* beta = nullptr;  // [C].
  const float* g = nullptr;     // [C], at most 0.
  int64_t gate_stride = 0;
  int64_t num_rows = 0;  // C, 1 to kDeltaChunkRows.
  int64_t key_features = 0;
  int64_t value_features = 0;
  const float* start_KV = nullptr;  // Null: zeros.
};

// Returns the floats of a workspace for one chunk, forward or backward.
constexpr int64_t DeltaWorkspaceFloats(int64_t key_features,
                                       int64_t value_features) {
  constexpr int64_t kRows = kDeltaChunkRows;
  const int64_t features =
      key_features > value_features ? key_features : value_features;
  const int64_t longest = features > 2 * kRows ? features : 2 * kRows;
  return kRows * (6 * kRows + 5 * key_features + 3 * value_features) +
         PanelFloats(longest, longest);
}

struct DeltaChunk {
  DeltaChunkRows rows;
  float* out = nullptr;  // [C, V].
  int64_t out_stride = 0;
  float* u = nullptr;  // [C, V], or null.
  int64_t u_stride = 0;
  float* stop_KV = nullptr;  // The state after the rows, or null. May be the
                             // state before them.
  float* workspace = nullptr;
};

struct DeltaChunkBackward {
  DeltaChunkRows rows;
  const float* u = nullptr;  // [C, V], from the forward pass.
  int64_t u_stride = 0;
  const float* dout = nullptr;  // [C, V].
  int64_t dout_stride = 0;
  const float* dstop_KV = nullptr;  // Null: zeros.
  // Adds to dstart_KV, or replaces dstop_KV in place if both are the same. Null
  // if the start state needs no gradient.
  float* dstart_KV = nullptr;
  float* dq = nullptr;  // [C, K], with the strides of `rows`, like all that
  float* dk = nullptr;  // follow.
  float* dv = nullptr;
  bool adds_keys = false;  // True: adds to dq and dk.
  float* dbeta = nullptr;
  float* dg = nullptr;
  float* workspace = nullptr;
};

// One row of one head, and its state, which is replaced.
struct DeltaStep {
  const float* q = nullptr;
  const float* k = nullptr;
  const float* v = nullptr;
  float beta = 0;
  float decay = 1;  // e^g.
  int64_t key_features = 0;
  int64_t value_features = 0;
  float* state_KV = nullptr;
  float* out = nullptr;  // [V].
};

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_GATED_DELTA_H_
