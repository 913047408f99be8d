// Computes the head's logits in chunks of rows, which share one buffer, and
// scores them if each rank has a part of the vocabulary. Private to src/loss.
//
// Several ranks: a rank computes local scores from its own logits. An exchange
// then merges the local scores of all ranks.
// Let lse_s be the log-sum-exp of the logits of rank s, and lse that of all
// logits. The share of rank s, which is the probability of its part, is w_s =
// e^(lse_s - lse). A log-probability is the local log-probability plus log w_s.
// The entropy is the sum over ranks of w_s (local entropy - log w_s). A sum
// over the vocabulary with the weights p is the sum over ranks of w_s times the
// rank's own sum, which has the local softmax as its weights.
//
// Legend: R score rows, E score entries, O own entries, which are the entries
// whose target this rank has, H hidden, V vocabulary.
#ifndef WEFT_SRC_LOSS_HEAD_CHUNKS_H_
#define WEFT_SRC_LOSS_HEAD_CHUNKS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "src/loss/fused_head.h"
#include "src/loss/head_products.h"
#include "src/loss/head_support.h"
#include "src/ops/vocab_rows.h"

namespace weft::loss {

// The logits of rows [begin, begin + count), and the rows' entries.
struct HeadChunk {
  int64_t begin = 0;
  int64_t count = 0;
  int64_t first_entry = 0;
  int64_t num_entries = 0;
  ops::VocabRowsInput input;
  ChunkSupports supports;
  // The row of every entry, counted among all rows. Defined if there is a
  // softcap or several ranks.
  at::Tensor all_rows_E;
  at::Tensor logits_RV;
  // If weights_RV is defined, the softmax is written to weights_RV, and the
  // logits are kept. scale_R is then the scale of the rows of weights_RV
  // (ops::VocabWeights).
  at::Tensor weights_RV;
  at::Tensor scale_R;

  // Returns the row of every entry, counted within the chunk. REQUIRES:
  // all_rows_E is defined.
  at::Tensor RowsOfEntries() const { return all_rows_E - begin; }
  // Returns the softcap's derivative D at the targets, [num_entries]. REQUIRES:
  // there is a softcap, and the softmax has not overwritten the logits yet.
  at::Tensor TargetSlopes() const;
  // Sets the log-probabilities and, if entropies_R is defined, the entropies.
  // Replaces the logits by softmax * D, with 0 at each row's own targets, and
  // returns the result. If weights_RV is defined, writes the result to
  // weights_RV instead, without the factor scale_R.
  const at::Tensor& SoftmaxBesideTargets(at::Tensor& logprobs_E,
                                         at::Tensor& entropies_R);
};

// Returns whether the softmax of these rows is written as bf16 weights, which a
// bf16 product reads directly. This is so on CUDA with a bf16 head, unless LoRA
// of lm_head, gradient filters or several ranks need the softmax in f32.
bool TakesWeights(const at::Tensor& weight_VH, const ScoreRows& rows,
                  const HeadOptions& options);

// Returns the row of every entry, [E].
std::vector<int64_t> RowsOfEntries(const ScoreRows& rows);

// The arrays of ScoreRows, on the head's device.
struct DeviceRows {
  at::Tensor row_offsets;    // [R + 1] i64.
  at::Tensor targets_E;      // i64.
  at::Tensor rows_E;         // i64, as HeadChunk::all_rows_E.
  at::Tensor temperature_R;  // f32.
};

// Computes the logits of score rows, one chunk after another. hidden_RH,
// weight_VH and `rows` outlive the object.
class HeadChunks {
 public:
  // Objects that are used together have different `buffer`s: 0 or 1.
  HeadChunks(const at::Tensor& hidden_RH, const at::Tensor& weight_VH,
             const ScoreRows& rows, const HeadOptions& options,
             size_t buffer = 0);

  // Makes ForEach set weights_RV and scale_R of every chunk. A chunk's scale_R
  // is a view of `scale_R` [R].
  void TakeWeights(const at::Tensor& scale_R);

  // Calls `visit` for the rows [begin, end), one chunk after another. The
  // chunk's logits_RV has the logits before the softcap. `shrunk_nR` is
  // lora().Shrink(hidden).
  void ForEach(int64_t begin, int64_t end,
               const std::vector<at::Tensor>& shrunk_nR,
               const std::function<void(HeadChunk&)>& visit) const;

  const HeadLora& lora() const { return lora_; }

 private:
  const at::Tensor& hidden_RH_;
  const at::Tensor& weight_VH_;
  const ScoreRows& rows_;
  const DeviceRows device_rows_;
  const double softcap_;
  const HeadLora lora_;
  const int64_t chunk_;
  const at::Tensor buffer_;
  at::Tensor weights_;
  at::Tensor scale_R_;
};

// The coefficients of the head's backward pass, which the host computes: one
// number for each entry and each row. They describe dz, the gradient of the
// logits. At the targets of row r, dz is
// `entries`; each target occurs once. Elsewhere dz is rows_R[r] * softmax * D.
struct HeadCoefficients {
  std::vector<int64_t> row_offsets;  // [R + 1], into `targets` and `entries`.
  std::vector<int64_t> targets;
  std::vector<double> entries;
  std::vector<double> rows_R;
};

// The entries whose target this rank has.
struct OwnEntries {
  ScoreRows rows;                  // Only own entries. Targets count from the
                                   // first token of the rank's vocabulary.
  std::vector<int64_t> entries_O;  // The index of each own entry among all
                                   // entries.
};

OwnEntries EntriesOfShard(const ScoreRows& rows, const VocabShard& shard);

// The index of each own entry among all entries, and the row of every entry.
// Both tensors cover all chunks and are on the head's device.
struct EntryPlaces {
  at::Tensor own_O;
  at::Tensor rows_E;
};
EntryPlaces PlacesOf(const ScoreRows& rows, const OwnEntries& own,
                     at::Device device);

// Returns the coefficients without the targets that other ranks have. rows_R is
// unchanged. Targets count from the first token of the rank's vocabulary.
HeadCoefficients CoefficientsOfShard(const HeadCoefficients& coefficients,
                                     const VocabShard& shard);

// The scores of a chunk's rows and entries. An unwanted tensor is undefined.
struct ChunkScores {
  at::Tensor logprobs_E;
  at::Tensor entropies_R;
  at::Tensor slopes_E;
  at::Tensor share_R;  // Defined if a gradient is wanted and ranks share the
                       // vocabulary.
};

// Scores a chunk of OwnEntries::rows. `rows` has the entries of all ranks, and
// `places` says which entries are own. If a gradient is wanted, replaces the
// logits by the local softmax * D, with 0 at the rows' targets that this rank
// has. Errors: throws c10::Error; std::exception if a rank is lost.
void ScoreChunkOfShard(HeadChunk& chunk, const ScoreRows& rows,
                       const EntryPlaces& places, parallel::Communicator& group,
                       ChunkScores& scores);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_CHUNKS_H_
