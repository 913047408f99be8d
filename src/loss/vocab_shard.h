// Scores entries if each rank has a part of the vocabulary. A rank computes
// local scores from its own logits. An exchange then merges the local scores of
// all ranks. Private to src/loss.
//
// Let lse_s be the log-sum-exp of the logits of rank s, and lse that of all
// logits. The share of rank s, which is the probability of its part, is w_s =
// e^(lse_s - lse). A log-probability is the local log-probability plus log w_s.
// The entropy is the sum over ranks of w_s (local entropy - log w_s). A sum
// over the vocabulary with the weights p is the sum over ranks of w_s times the
// rank's own sum, which has the local softmax as its weights.
//
// Legend: R score rows of a chunk, E score entries, O own entries, which are
// the entries whose target this rank has.
#ifndef WEFT_SRC_LOSS_VOCAB_SHARD_H_
#define WEFT_SRC_LOSS_VOCAB_SHARD_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "src/loss/fused_head.h"
#include "src/loss/head_chunks.h"
#include "src/loss/head_coefficients.h"

namespace weft::loss {

// The entries whose target this rank has.
struct OwnEntries {
  ScoreRows rows;                  // Only own entries. Targets count from the
                                   // first token of the rank's vocabulary.
  std::vector<int64_t> entries_O;  // The index of each own entry among all
                                   // entries.
};

[[nodiscard]] OwnEntries EntriesOfShard(const ScoreRows& rows,
                                        const VocabShard& shard);

// The index of each own entry among all entries, and the row of every entry.
// Both tensors cover all chunks and are on the head's device.
struct EntryPlaces {
  at::Tensor own_O;
  at::Tensor rows_E;
};
[[nodiscard]] EntryPlaces PlacesOf(const ScoreRows& rows, const OwnEntries& own,
                                   at::Device device);

// Returns the coefficients without the targets that other ranks have. rows_R is
// unchanged. Targets count from the first token of the rank's vocabulary.
[[nodiscard]] HeadCoefficients CoefficientsOfShard(
    const HeadCoefficients& coefficients, const VocabShard& shard);

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

#endif  // WEFT_SRC_LOSS_VOCAB_SHARD_H_
