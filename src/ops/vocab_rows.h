// Row statistics over the vocabulary for the fused head.
// Legend: R rows of a chunk, V vocabulary, E score entries (row, target).
#ifndef WEFT_SRC_OPS_VOCAB_ROWS_H_
#define WEFT_SRC_OPS_VOCAB_ROWS_H_

#include <ATen/core/Tensor.h>

namespace weft::ops {

// The entries and options of one chunk of logits. Row r of the chunk owns the
// entries [row_offsets[r], row_offsets[r + 1]), counted from row_offsets[0].
struct VocabRowsInput {
  at::Tensor row_offsets;    // [R + 1] i64.
  at::Tensor targets_E;      // [E] i64.
  at::Tensor temperature_R;  // [R] f32, > 0.
  double softcap = 0;        // If > 0, z = cap * tanh(z / cap).
  // The written softmax is 0 at the row's own targets.
  bool clear_targets = false;
};

// Makes one pass over the logits, with z = softcap(logits) / temperature. It
// computes logprobs[e] = z[row, target] - logsumexp(z[row]) and, if `entropy_R`
// is defined, the entropy of softmax(z[row]) in nats. If `softmax_in_place`,
// the buffer then holds softmax(z) * D, where D is the softcap's derivative (1
// without softcap).
// Shapes:  logits_RV [R, V] f32; logprobs_E [E] f32; entropy_R [R] f32 or
//          undefined; all contiguous. Targets and offsets are not checked.
// Errors:  throws c10::Error, which names the argument.
// Units:   statistics in f32; sums over blocks limit the rounding errors.
// Threads: engine thread only.
void VocabRows(at::Tensor& logits_RV, const VocabRowsInput& input,
               bool softmax_in_place, at::Tensor& logprobs_E,
               at::Tensor& entropy_R);

// Like VocabRows, but keeps the logits and writes the softmax to weights that a
// product can read, so that weights[r] * scale[r] = softmax(z[r]) * D. Reads
// each row once. Only on CUDA.
// Shapes:  weights_RV [R, V] bf16, scale_R [R] f32; contiguous.
void VocabWeights(const at::Tensor& logits_RV, const VocabRowsInput& input,
                  at::Tensor& weights_RV, at::Tensor& scale_R,
                  at::Tensor& logprobs_E, at::Tensor& entropy_R);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_VOCAB_ROWS_H_
