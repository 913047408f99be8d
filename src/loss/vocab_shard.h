// The head over a part of the vocabulary: what a rank computes from its own
// logits, and the exchange between ranks. Private to src/loss.
//
// Let lse_s be the log-sum-exp of the logits of rank s, and lse that of all
// logits. The share of the rank's part is w_s = e^(lse_s - lse). A
// log-probability is the local one plus log w_s. The entropy is the sum of w_s
// (local entropy - log w_s). A sum over the vocabulary with p is the sum over
// ranks of w_s times the sum with the local softmax.
//
// Legend: R score rows of a chunk, E score entries, O entries whose target this
// rank has.
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
  ScoreRows rows;                  // Only own entries; targets count from 0.
  std::vector<int64_t> entries_O;  // The index of each own entry among all
                                   // entries.
};

[[nodiscard]] OwnEntries EntriesOfShard(const ScoreRows& rows,
                                        const VocabShard& shard);

// The index of each own entry among all entries, and the row of every entry.
// Both cover the whole pass and are on the head's device.
struct EntryPlaces {
  at::Tensor own_O;
  at::Tensor rows_E;
};
[[nodiscard]] EntryPlaces PlacesOf(const ScoreRows& rows, const OwnEntries& own,
                                   at::Device device);

// Returns the coefficients of the entries whose targets this rank has.
[[nodiscard]] HeadCoefficients CoefficientsOfShard(
    const HeadCoefficients& coefficients, const VocabShard& shard);

// The scores of a chunk's rows and entries. A tensor is undefined if it is not
// wanted.
struct ChunkScores {
  at::Tensor logprobs_E;
  at::Tensor entropies_R;
  at::Tensor slopes_E;
  at::Tensor share_R;  // Defined if a gradient is wanted.
};

// Scores a chunk of OwnEntries::rows. `rows` has all rows, and `places` says
// which entries are own. If a gradient is wanted, the logits become the local
// softmax * D, with 0 at the rows' own targets. Errors: throws c10::Error;
// std::exception if a rank is lost.
void ScoreChunkOfShard(HeadChunk& chunk, const ScoreRows& rows,
                       const EntryPlaces& places, parallel::Communicator& group,
                       ChunkScores& scores);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_VOCAB_SHARD_H_
