// The output head and the log-probabilities. They are computed in chunks of
// rows, so that memory need not hold the logits of all rows.
//
// Legend: R score rows, E score entries (row, target), H hidden, V vocabulary,
// N parameters of an adapter. h is the hidden rows [R, H], W the head's weight
// [V, H], and p the softmax.
//
// Forward, for each chunk of rows:
//   1. logits = h W^T, in a buffer [chunk, V] that chunks share;
//   2. the buffer gives each entry's logprob and, if wanted, the entropies;
//   3. if a gradient is wanted, U = (p * D) W [R, H] is computed from the
//      buffer (or from a second buffer in bf16) and kept. D is the derivative
//      of the softcap, or 1. In U, p at a row's own targets counts as 0.
// Without LoRA of lm_head, the backward pass then needs no logits. Only the
// backward pass knows c, which is dLoss/dlogprob divided by the temperature.
// Let C be the sum of a row's c over its targets t. Then
//   dh[r] = (sum over t of (c[t] - C p[t]) D_t W_t) - C U[r].
// U leaves out the targets, because for a confident prediction p is near 1, and
// W_t - p W_t would cancel. 1 - p is computed from the log-probability instead.
// The total is about 4 R H V FLOPs and chunk * V + R * H floats.
//
// Rows of an adapter of lm_head use W + scale B A. The adapter's dA and the
// rows' dh follow from (p * D) B, which is kept like U. With the gradient dz of
// the logits, dB = scale dz^T (h A^T), which needs the logits again. So each of
// these rows costs 6 H V FLOPs.
//
// Several ranks may each have a part of the vocabulary (head_chunks.h). The
// forward pass then makes one small exchange for each chunk, which gives all
// ranks the log-probabilities and entropies. The backward pass ends with a sum
// of [R, H] over the ranks. Each rank has all of lm_head's A and its own rows
// of B. A rank's dA is one term of a sum over the ranks.
#ifndef WEFT_SRC_LOSS_FUSED_HEAD_H_
#define WEFT_SRC_LOSS_FUSED_HEAD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/lora/lora_linear.h"
#include "src/parallel/communicator.h"

namespace weft::loss {

// The part of the vocabulary that a rank has.
struct VocabShard {
  parallel::Communicator* group = nullptr;  // Null if this rank has the whole
                                            // vocabulary.
  // The size of the whole vocabulary, of which this rank has the range
  // group->shard().Of(vocab). Not used if `group` is null.
  int64_t vocab = 0;
};

struct HeadOptions {
  int64_t chunk_rows = 0;  // 0 or less: one chunk has all rows.
  double softcap = 0;      // 0: no softcap.
  VocabShard shard;
};

// Returns the number of rows of a chunk: the lesser of num_rows and
// options.chunk_rows, or fewer on a CPU with a large vocabulary. Returns
// num_rows if options.chunk_rows is 0 or less. `vocab` is the size of the
// largest part of the vocabulary on a rank.
int64_t HeadChunkRows(const HeadOptions& options, int64_t num_rows,
                      int64_t vocab, bool is_cpu);

// The rows whose distributions have only some tokens: row rows[m] has the ids
// [offsets[m], offsets[m + 1]) of `ids`, which increase. The logits of other
// tokens count as -inf, also after the softcap. The row's targets are among its
// ids. On several ranks, a row's ids may all be on other ranks.
struct RowSupports {
  std::vector<int64_t> rows;     // [M], ascending.
  std::vector<int64_t> offsets;  // [M + 1]; empty if M is 0.
  std::vector<int32_t> ids;
};

// The rows to score. The entries of row r are [row_offsets[r], row_offsets[r +
// 1]).
struct ScoreRows {
  std::vector<int64_t> row_offsets;  // [R + 1].
  std::vector<int64_t> targets;      // [E], in [0, V).
  std::vector<float> temperatures;   // [R], > 0.
  // Gradient filters, [R] in [0, 1). Empty means that all are 0. A row's U
  // leaves out a block of a rank's vocabulary if p D is below the row's filter
  // at all tokens of the block. The row's own targets do not count.
  std::vector<float> filters;
  RowSupports supports;  // A row that is not in it has the whole vocabulary.
  lora::LoraRouting routing;  // The adapters of the rows; may be empty.
};

struct HeadResult {
  at::Tensor logprobs_E;      // [E] f32.
  at::Tensor entropies_R;     // [R] f32; undefined if not wanted.
  at::Tensor projection_RH;   // U [R, H] f32; undefined without gradient.
  at::Tensor target_slope_E;  // D_t [E] f32; undefined without softcap or
                              // without gradient.
  // The probability [R] of the rank's part of the vocabulary. Undefined without
  // gradient, or if the rank has the whole vocabulary. If defined, U and
  // projected_nR are the rank's terms of sums over ranks.
  at::Tensor share_R;
  // Factors [R], f32, by which the rows of U must still be multiplied.
  // Undefined means 1.
  at::Tensor scale_R;
  // h A^T and, if a gradient is wanted, (p * D) B of each segment. A tensor is
  // undefined if the segment's adapter does not adapt lm_head.
  std::vector<at::Tensor> shrunk_nR;
  std::vector<at::Tensor> projected_nR;
};

// Scores the rows. Waits for the device only to count the rows that a gradient
// filter keeps.
// Shapes:  hidden_RH [R, H]; weight_VH [V, H] of the same dtype, or in bf16
// with f32 rows on a CPU, or in 8 bits (head_products.h). With options.shard,
// weight_VH and the adapters in rows.routing are this rank's parts. hidden_RH
// and the other fields of `rows` are the same on all ranks. All ranks make this
// call together.
// Errors:  throws c10::Error; std::exception if a rank is lost.
// Threads: engine thread only.
// Source:  the derivation above.
HeadResult ScoreHead(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                     const ScoreRows& rows, const HeadOptions& options,
                     bool want_gradient, bool want_entropy);

// Returns dLoss/dhidden [R, H] in the dtype of hidden, for g_E = dLoss/dlogprob
// [E] f32. Adds the gradients of lm_head's LoRA to `gradients` [N]. The other
// arguments are those of ScoreHead, which was called with want_gradient.
// Consumes `forward`, because dhidden uses U's memory. Every rank gets the
// whole dhidden. Waits for the device only if g_E, forward.logprobs_E or
// forward.target_slope_E are not on the host yet (ops::ToHost). Errors and
// threads as for ScoreHead.
at::Tensor HeadBackward(HeadResult forward, const at::Tensor& hidden_RH,
                        const at::Tensor& weight_VH, const ScoreRows& rows,
                        const HeadOptions& options, at::Tensor g_E,
                        const lora::LoraGradients& gradients);

// Returns the logits of few rows, for example to draw the next tokens:
// softcap(hidden W^T + LoRA) in f32, on the device of hidden. A softcap of 0
// changes nothing. `routing` names the adapters of the rows. If shard.group is
// not null, the weight has this rank's rows, and every rank gets the same bits
// for the whole vocabulary.
// Shapes:  hidden_RH [R, H], weight_VH [V, H] as in ScoreHead. The result
// [R, V] is contiguous.
// Threads: engine thread only.
at::Tensor HeadLogits(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
                      const lora::LoraRouting& routing, double softcap,
                      const VocabShard& shard = {});

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_FUSED_HEAD_H_
