// CPU kernels on raw pointers and sizes, with one table of functions for each
// instruction set. They use no Torch and no Abseil, and start no threads.
// Callers split rows between threads. The result of a row does not depend on
// other rows, so a NaN in a row of x affects no result of another row.
//
// Legend: D features of a row, C head features, F feed-forward features, V
// vocabulary, N rows, I inputs and O outputs of a product.
#ifndef WEFT_KERNELS_CPU_KERNELS_H_
#define WEFT_KERNELS_CPU_KERNELS_H_

#include <cstdint>

#include "kernels/cpu/gated_delta.h"
#include "kernels/cpu/int8_rows.h"
#include "kernels/cpu/paged_attention.h"
#include "kernels/cpu/panel_product.h"
#include "kernels/cpu/row_arguments.h"
#include "kernels/cpu/row_product.h"

namespace weft::kernels::cpu {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// The longest vocabulary that `vocab_row` takes.
inline constexpr int64_t kMaxVocab = int64_t{1} << 22;

struct KernelTable {
  Isa isa;
  const char* name;

  // Computes y = x * rsqrt(mean(x^2) + eps) * weight for one row [D]. y may be
  // x.
  void (*rms_norm_row)(const float* x, const float* weight, int64_t features,
                       float eps, float* y);
  // Adds dLoss/dx to dx for one row [D], given dy = dLoss/dy.
  void (*rms_norm_backward_row)(const float* dy, const float* x,
                                const float* weight, int64_t features,
                                float eps, float* dx);
  // Rotates one head [C] in place. The pair of features (c, c + C/2) turns by
  // the angle with cosine cos[c] and sine sin[c]. `inverse` negates the angle.
  void (*rotary_head)(float* x, const float* cos, const float* sin,
                      int64_t half_features, bool inverse);
  // Computes y += x for `count` elements.
  void (*add_row)(const float* x, int64_t count, float* y);
  // Computes y = 1 / (1 + e^-x) for `count` elements.
  void (*sigmoid_row)(const float* x, int64_t count, float* y);
  // Computes out [F] = silu(gate) * up.
  void (*swiglu_row)(const float* gate, const float* up, int64_t features,
                     float* out);
  // Replaces gate and up [F] by their gradients, given dout = dLoss/dout [F].
  void (*swiglu_backward_row)(const float* dout, int64_t features, float* gate,
                              float* up);
  // Compute the same as the swiglu functions, but with GELU's tanh form in
  // place of silu.
  void (*geglu_row)(const float* gate, const float* up, int64_t features,
                    float* out);
  void (*geglu_backward_row)(const float* dout, int64_t features, float* gate,
                             float* up);
  // Computes out [F] = g sigmoid(1.702 g) (clamp(up, -7, 7) + 1), where g =
  // min(gate, 7).
  void (*clamped_swiglu_row)(const float* gate, const float* up,
                             int64_t features, float* out);
  void (*clamped_swiglu_backward_row)(const float* dout, int64_t features,
                                      float* gate, float* up);
  // Computes y = weight x / rms(x) silu(z) for one row [D].
  void (*gated_norm_row)(const float* x, const float* z, const float* weight,
                         int64_t features, float eps, float* y);
  // Writes the gradients dx and dz, given dy = dLoss/dy.
  void (*gated_norm_backward_row)(const float* dy, const float* x,
                                  const float* z, const float* weight,
                                  int64_t features, float eps, float* dx,
                                  float* dz);
  // Computes y = x w, or adds it to y, for `count` elements.
  void (*multiply_row)(const float* x, const float* weight, int64_t count,
                       bool adds, float* y);
  // Writes q, k and v of the gated delta rule for one row [W].
  void (*delta_mix_row)(const DeltaMixRow& row, float* mixed);
  // Replaces d [W], the gradient of q, k and v, by the gradient of the
  // convolution.
  void (*delta_mix_backward_row)(const DeltaMixRow& row, float* d);
  // Computes a chunk of the gated delta rule: the rows' outputs and the state
  // after them. No other buffer overlaps another one.
  // Source: src/ops/delta_chunks.h.
  void (*delta_chunk)(const DeltaChunk& chunk);
  // Writes or adds the gradients of a chunk.
  void (*delta_chunk_backward)(const DeltaChunkBackward& chunk);
  // Computes one row by the rule itself. Reads the state from memory once.
  void (*delta_step)(const DeltaStep& step);
  // Scores one row of logits x [V], V <= kMaxVocab, with z = softcap(x) /
  // temperature. Writes logprobs[i] = z[targets[i]] - logsumexp(z), and the
  // entropy of softmax(z) in nats if `entropy` is not null. If
  // options.write_softmax, overwrites x by softmax(z) * softcap'(x).
  void (*vocab_row)(float* logits, int64_t vocab,
                    const VocabRowOptions& options, const int64_t* targets,
                    int64_t num_targets, float* logprobs, float* entropy);
  // Writes softcap tanh(x / softcap) of `count` numbers x to y, which may be x.
  // Returns the largest. REQUIRES: softcap > 0.
  float (*softcap_row)(const float* x, int64_t count, float softcap, float* y);
  // Returns the largest of `count` logits, ignoring NaN. If all logits are NaN
  // or -inf, returns the lowest finite number.
  float (*max_block)(const float* logits, int64_t count);
  // Writes the weights e^((logit - max) factor) of `count` logits, and returns
  // their sum. A logit of -inf has weight 0. A NaN makes its weight and the sum
  // NaN.
  // REQUIRES: `max` is finite, and factor > 0.
  float (*weigh_block)(const float* logits, int64_t count, float max,
                       float factor, float* weights);
  // Writes softmax(softcap(scale * q k^T)) v over the item's tokens to out [N,
  // G, C], and the log-sum-exp of the scores to lse [N, G]. PagedAttentionItem
  // defines the letters. lse_merge_rows merges results over disjoint tokens.
  // Reads a key/value head from memory once for up to 32 of its query heads.
  // The bits of a query head's result do not depend on other query heads. They
  // are those of panel_product with k^T, softmax_row and panel_product with v,
  // in_order.
  void (*paged_attention)(const PagedAttentionItem& item, float* out,
                          float* lse);
  // Replaces scores [size] by the weights e^(softcap(score) - max), which are 0
  // for keys that the query may not see. Returns 1 / sum of the weights and the
  // log-sum-exp, or 0 and -inf if the query sees none. softcap(x) is x if
  // softcap is 0, otherwise softcap * tanh(x / softcap).
  SoftmaxSum (*softmax_row)(const SoftmaxKeys& keys, float softcap,
                            float* scores);
  // Replaces scores [size] by the weights w = e^(softcap(score) - lse).
  // Replaces dweights, which holds dLoss/dw, by dLoss/dscore = w (dLoss/dw -
  // delta) softcap'(score). Both results are 0 for keys that the query may not
  // see. Over all keys of the query, lse is the log-sum-exp of softcap(score),
  // and delta is the sum of w dLoss/dw.
  void (*softmax_gradient_row)(const SoftmaxKeys& keys, float softcap,
                               float lse, float delta, float* scores,
                               float* dweights);
  // Merges the attention result `part` into `out`, a result over other keys.
  // For each row: l = log(e^lse + e^part_lse), out = out e^(lse - l) + part
  // e^(part_lse - l), lse = l. A row with part_lse -inf has no keys in `part`,
  // and its out and lse do not change. Shapes: out, part [N, C]; lse [N].
  void (*lse_merge_rows)(const float* part, const float* part_lse,
                         int64_t num_rows, int64_t head_features, float* out,
                         float* lse);
  // Computes y = x W^T + bias for the item's range of outputs. W [O, I] is f32,
  // bf16 or in 8 bits (int8_rows.h). It is widened to f32, and sums are f32. W
  // is read from memory once for all of up to kFewRows rows of x, or for
  // kRowBlock rows of more. y does not overlap other operands. The bits of an
  // element of y do not depend on other rows or on the range. A NaN in x
  // affects only its row of y, and a NaN in W only its output.
  // Source: Goto and van de Geijn 2008, with both operands read along the sum.
  void (*row_product_f32)(const RowProduct& item, const float* weight);
  void (*row_product_bf16)(const RowProduct& item, const uint16_t* weight);
  void (*row_product_int8)(const RowProduct& item, const int8_t* weight);
  // Writes x [inputs] in 8 bits to `row` (int8_rows.h). Returns whether all x
  // are finite; if not, `row` is incomplete.
  bool (*quantize_row)(const float* x, int64_t inputs, int8_t* row);
  // Writes the weights [begin, end) of an 8-bit row to `out`, as exact f32.
  void (*widen_int8_row)(const int8_t* row, int64_t inputs, int64_t begin,
                         int64_t end, float* out);
  // Writes `count` bf16 numbers to `out` as f32.
  void (*widen_bf16_row)(const uint16_t* row, int64_t count, float* out);
  // Computes out = scale left right, or adds this product to out, in f32. `out`
  // does not overlap other operands. The bits of an element of `out` do not
  // depend on other rows or columns, nor on whether the right matrix is in
  // panels. A NaN in the left matrix affects only its row of `out`, and a NaN
  // in the right matrix only its column.
  void (*panel_product)(const PanelProduct& item);
  // Copies a matrix to panels, which panel_product of the same table reads.
  void (*copy_panels)(const PanelCopy& copy);
  // Makes one AdamW update of `count` weights, and of their moments in place.
  // Writes the new weights to weights_out, which may equal `weights`.
  void (*adamw)(const AdamWScalars& scalars, int64_t count,
                const float* weights, const float* gradient, float* moment1,
                float* moment2, float* weights_out);
  // Returns the sum of x^2 in f64.
  double (*sum_of_squares)(const float* x, int64_t count);
  // Computes y = e^x for every element, within 2 ulp. The result is 0 for x <
  // -87.33654 and +inf for x > 88.37626. Tests use it to check the polynomial
  // that other kernels inline.
  void (*exp)(const float* x, int64_t count, float* y);
};

// Returns the table of the widest instruction set that the processor and the
// build have. Threads: any.
const KernelTable& Kernels();

// Returns the table of one instruction set, or null if the processor or the
// build lacks that set.
const KernelTable* KernelsFor(Isa isa);

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_KERNELS_H_
