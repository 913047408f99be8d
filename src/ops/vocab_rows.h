// Log-probabilities, entropy and softmax of rows of logits, for the
// language-model head, which computes its logits in chunks of rows.
// Legend: R rows of a chunk, V vocabulary, E score entries (row, target).
#ifndef WEFT_SRC_OPS_VOCAB_ROWS_H_
#define WEFT_SRC_OPS_VOCAB_ROWS_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// The entries and options of one chunk of logits. An entry asks for the
// log-probability of a target in a row. Row r of the chunk has the entries
// [row_offsets[r], row_offsets[r + 1]), counted from row_offsets[0].
struct VocabRowsInput {
  at::Tensor row_offsets;    // [R + 1] i64.
  at::Tensor targets_E;      // [E] i64.
  at::Tensor temperature_R;  // [R] f32, > 0.
  double softcap = 0;        // If > 0, x becomes softcap * tanh(x / softcap).
  // If true, 0 is written in place of the softmax at the targets of the row's
  // entries. See U in src/loss/fused_head.h.
  bool clear_targets = false;
};

// Scores the logits, with z = softcap(logits) / temperature. Computes
// logprobs[e] = z[row, target] - logsumexp(z[row]) and, if `entropy_R` is
// defined, the entropy of softmax(z[row]) in nats. If `softmax_in_place`,
// overwrites logits_RV by softmax(z) * D, where D is the softcap's derivative
// (1 without softcap).
// Shapes:  logits_RV [R, V], logprobs_E [E] and entropy_R [R] of one dtype, f32
//          or f64; entropy_R may be undefined; all contiguous. Targets and
//          offsets are not checked.
// Errors:  throws c10::Error, which names the argument.
// Threads: engine thread only.
void VocabRows(at::Tensor& logits_RV, const VocabRowsInput& input,
               bool softmax_in_place, at::Tensor& logprobs_E,
               at::Tensor& entropy_R);

// Does what VocabRows does, but keeps the logits and writes the softmax as bf16
// weights for a matrix product: weights[r] * scale[r] = softmax(z[r]) * D,
// where D is the softcap's derivative.
// Shapes:  weights_RV [R, V] bf16, scale_R [R] f32; contiguous.
// Errors:  throws c10::Error, also if the logits are not f32 on CUDA.
void VocabWeights(const at::Tensor& logits_RV, const VocabRowsInput& input,
                  at::Tensor& weights_RV, at::Tensor& scale_R,
                  at::Tensor& logprobs_E, at::Tensor& entropy_R);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_VOCAB_ROWS_H_
