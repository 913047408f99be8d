// The scores of rows whose distributions have only some of the vocabulary's
// tokens (RowSupports). Private to src/loss.
//
// The kernels score whole rows. The scores of rows with a support are computed
// beside them, from the logits of the support's tokens alone, and replace those
// of the kernels. So the kernels know nothing of supports, and other rows keep
// their bits. A row costs one read and one write of its logits more, and time
// O(ids) in f64.
//
// Legend: R rows of a chunk, V vocabulary, E score entries, M rows with a
// support, n the ids of their supports, e the entries of these rows.
#ifndef WEFT_SRC_LOSS_HEAD_SUPPORT_H_
#define WEFT_SRC_LOSS_HEAD_SUPPORT_H_

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "src/loss/fused_head.h"
#include "src/ops/vocab_rows.h"

namespace weft::loss {

// All tensors are f64. Undefined if the chunk has no row with a support.
struct SupportScores {
  at::Tensor lse_M;  // -inf if the row has no id.
  at::Tensor logprobs_e;
  at::Tensor entropies_M;  // Not finite if the row has no id.
  at::Tensor softmax_n;    // softmax * D, D as in fused_head.h.
};

// The rows of one chunk that have a support. The methods do nothing if there
// are none. Threads: engine thread only. Errors: throw c10::Error.
class ChunkSupports {
 public:
  // A chunk whose rows have no supports.
  ChunkSupports() = default;
  // The supports of rows [begin, begin + count), uploaded to `device`.
  ChunkSupports(const ScoreRows& rows, int64_t begin, int64_t count,
                at::Device device);

  // Scores the rows. REQUIRES: the softmax has not overwritten the logits yet.
  // Shapes: logits_RV [R, V] and `input` as for ops::VocabRows.
  SupportScores Score(const at::Tensor& logits_RV,
                      const ops::VocabRowsInput& input) const;
  // Replaces the scores of the rows and of their entries. entropies_R may be
  // undefined.
  void PutScores(const SupportScores& scores, at::Tensor& logprobs_E,
                 at::Tensor& entropies_R) const;
  // Replaces the log-sum-exp of the rows, [R] f64.
  void PutLogSums(const SupportScores& scores, at::Tensor& lse_R) const;
  // Replaces the softmax of the rows, with 0 outside their supports and, if
  // input.clear_targets, at their own targets. The factors scale_R [R] of
  // ops::VocabWeights, if defined, become 1 for the rows.
  void PutSoftmax(const SupportScores& scores, const ops::VocabRowsInput& input,
                  at::Tensor& softmax_RV, at::Tensor scale_R = {}) const;

 private:
  at::Tensor rows_M_;     // Counted within the chunk. Undefined if none.
  at::Tensor ids_n_;      // The ids, row by row.
  at::Tensor owners_n_;   // Of each id, its row's index among the M.
  at::Tensor places_n_;   // Of each id, its place in [M, width], flat.
  at::Tensor entries_e_;  // The rows' entries, counted within the chunk.
  at::Tensor owners_e_;   // Of each entry, its row's index among the M.
  int64_t width_ = 1;     // The most ids of a row.
};

// Returns the supports on a rank that has the tokens [begin, end) of the
// vocabulary: their ids in this range, counted from its begin. All rows stay,
// also those without an id in the range.
RowSupports SupportsOfShard(const RowSupports& supports, int64_t begin,
                            int64_t end);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_SUPPORT_H_
