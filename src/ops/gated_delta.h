// The gated delta rule: linear attention with one matrix of state for each
// head, with the convolution before it and the norm after it.
//
// Legend: T packed rows, W features of the convolution (2 J K + H V: q | k |
// v), J key heads, H value heads (H % J == 0; value head h uses key head h / (H
// / J)), K key features, V value features, R rows before a row that its
// convolution reads (kernel size - 1), S kept states, N slots, Q
// sequences.
//
// A causal convolution of each feature and silu make q, k and v of a row. q and
// k have l2 norm 1, and q is scaled by K^-0.5. The state S is [K, V]:
//
//   u_t = beta_t (v_t - e^g_t S_{t-1}^T k_t)
//   S_t = e^g_t S_{t-1} + k_t u_t^T
//   o_t = S_t^T q_t
//
// where beta = sigmoid(beta's row) and g = -e^a_log softplus(alpha + dt_bias).
// Rows are computed in chunks, by products of matrices.
//
// Over a prefix tree, a node starts with the end state of its parent, and its
// first rows read the parent's last rows before the convolution. A root starts
// with zeros.
//
// Source: Yang et al. 2024 (gated delta networks; the chunk form is in Yang et
// al. 2024, DeltaNet); transformers' modeling_qwen3_5.
#ifndef WEFT_SRC_OPS_GATED_DELTA_H_
#define WEFT_SRC_OPS_GATED_DELTA_H_

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/cpu/gated_delta.h"
#include "src/ops/tree_attention.h"

namespace weft::ops {

// The largest kernel of the convolution.
inline constexpr int64_t kMaxDeltaTaps = kernels::cpu::kMaxDeltaTaps;
// The most rows between states that a tape keeps.
using kernels::cpu::kDeltaChunkRows;

// The weights of a layer have the dtype of its activations, but may be f32.
// a_log and dt_bias are f32, or f64 for f64.
struct DeltaParameters {
  at::Tensor conv_WR1;     // [W, R + 1], 2 <= R + 1 <= kMaxDeltaTaps. Fastest
                           // if it is the transpose of contiguous memory.
  at::Tensor conv_bias_W;  // May be undefined.
  at::Tensor a_log_H;
  at::Tensor dt_bias_H;
  int64_t num_key_heads = 0;
  int64_t num_value_heads = 0;
  int64_t key_features = 0;
  int64_t value_features = 0;
  double l2_eps = 1e-6;
};

// The outputs of the projections, or their gradients. All have one dtype, unit
// stride in the last dimension and any row stride.
struct DeltaInputs {
  at::Tensor qkv_TW;  // Before the convolution.
  at::Tensor beta_TH;
  at::Tensor alpha_TH;
};

// The rows of the rule, in f32 (f64 for f64).
struct DeltaRows {
  // q, k and v. The kernels for CUDA write them in the dtype of the inputs.
  at::Tensor mixed_TW;
  at::Tensor beta_TH;
  at::Tensor g_TH;
};

// What GatedDelta keeps for its backward pass. The backward pass computes it
// again if it is empty.
struct DeltaTape {
  DeltaRows rows;
  at::Tensor u_THV;        // In the dtype of q, k and v.
  at::Tensor states_SHKV;  // Those after chunks that others follow, in f32 (f64
                           // for f64).
};

// kKeep: every state has its own index, for a backward pass. kReplace: a node
// has one state. kContinue: the same, and root i starts with state i and
// replaces it. Then all nodes are roots.
enum class DeltaStateUse { kKeep, kReplace, kContinue };

struct DeltaPlan;

// The prefix trees of a pass. The layers of a pass share one, because it keeps
// the plans that they all read, and the plans' copies on the device.
// Threads: engine thread only.
class DeltaTrees {
 public:
  // The nodes cover rows [0, T) in depth-first order, T >= 1. If slots_Q [Q] is
  // defined, they are Q roots, and sequence i continues the state of its slot,
  // which no other sequence has.
  explicit DeltaTrees(std::vector<AttentionNode> nodes,
                      at::Tensor slots_Q = {});
  DeltaTrees(const DeltaTrees&) = delete;
  DeltaTrees& operator=(const DeltaTrees&) = delete;
  ~DeltaTrees();

  const std::vector<AttentionNode>& nodes() const { return nodes_; }
  // Returns a plan, made on the first call. All calls have one num_earlier.
  const DeltaPlan& Plan(DeltaStateUse use, int64_t num_earlier) const;

 private:
  const std::vector<AttentionNode> nodes_;
  const at::Tensor slots_Q_;
  mutable std::array<std::unique_ptr<DeltaPlan>, 3> plans_;
};

// Returns the outputs o of all rows, [T, H, V] in the dtype of the inputs. If
// `tape` is not null, fills it.
// Errors:  throws c10::Error.
// Threads: engine thread only.
at::Tensor GatedDelta(const DeltaInputs& inputs,
                      const DeltaParameters& parameters,
                      const DeltaTrees& trees, DeltaTape* tape);

// Writes the gradients of the inputs to `into`, given dout = dLoss/dout. Clears
// the tape. The weights get no gradient. Takes as many elements as the tape, in
// f32 (f64 for f64). The kernels for CUDA also take (V / 64) 2 T H (K + 1) +
// T J K floats, for parts of the gradients of q, k, beta and g and their sums,
// and T H (V + 3 C) + S H K V numbers in bf16, for C rows of a chunk.
// Shapes:  dout like out; `into` like the inputs. The gradients may be views of
//          one matrix. They may not alias the inputs.
void GatedDeltaBackward(const at::Tensor& dout_THV, const DeltaInputs& inputs,
                        const DeltaParameters& parameters,
                        const DeltaTrees& trees, DeltaTape& tape,
                        const DeltaInputs& into);

// The states of sequences, in slots. A new sequence has zeros.
struct DeltaStates {
  at::Tensor conv_NRW;    // The last R rows before the convolution.
  at::Tensor state_NHKV;  // f32 (f64 for f64).
  at::Tensor slots_Q;     // int64, [Q]: the slot of each sequence.
  // Sequences in this slot are padding. Several may have it, nobody reads their
  // results, and a step may leave out their states.
  int64_t padding_slot = -1;
};

// Returns the outputs of the next rows of sequences, like GatedDelta. Sequence
// i starts with the state of slots_Q[i] and replaces it. `sequences` are made
// with the same slots.
at::Tensor GatedDeltaPrefill(const DeltaInputs& inputs,
                             const DeltaParameters& parameters,
                             const DeltaTrees& sequences,
                             const DeltaStates& states);

// Does the same for one row of each sequence (T = Q), in one pass over the
// states. Waits for no device and reads nothing on the host, so a CUDA graph
// may record it.
at::Tensor GatedDeltaStep(const DeltaInputs& inputs,
                          const DeltaParameters& parameters,
                          const DeltaStates& states);

// Returns weight * x / rms(x) * silu(z), with the norm over V.
// Shapes: x, z [T, H, V] with unit stride in V, one dtype; weight_V [V], the
//         same dtype or f32. Computes in f32, or in f64 for f64.
at::Tensor GatedRmsNorm(const at::Tensor& x_THV, const at::Tensor& z_THV,
                        const at::Tensor& weight_V, double eps);

// Writes the gradients of x and z, given dy = dLoss/dy. Shapes: like x; dx and
// dz may not alias x, z or dy.
void GatedRmsNormBackward(const at::Tensor& dy_THV, const at::Tensor& x_THV,
                          const at::Tensor& z_THV, const at::Tensor& weight_V,
                          double eps, const at::Tensor& dx_THV,
                          const at::Tensor& dz_THV);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_GATED_DELTA_H_
