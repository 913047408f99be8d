// The factors by which the head's vectors are multiplied in its backward pass.
// The host computes one number per entry. Private to src/loss.
//
// Legend: R score rows, E score entries.
#ifndef WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
#define WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_

#include <cstdint>
#include <vector>

#include "src/loss/fused_head.h"

namespace weft::loss {

// Describes dz, the gradient of the logits. At its targets, each listed once,
// the dz of row r is `entries`. Elsewhere it is rows_R[r] * softmax(z) * D.
struct HeadCoefficients {
  std::vector<int64_t> row_offsets;  // [R + 1], index into the next two.
  std::vector<int64_t> targets;
  std::vector<double> entries;
  std::vector<double> rows_R;
};

// Merges a row's entries with equal targets. For confident predictions their
// coefficients nearly cancel, so they are summed before the rounding to f32.
// `gradients_E` is dLoss/dlogprob. `slopes_E` is D at the targets, and is empty
// without softcap.
[[nodiscard]] HeadCoefficients MakeHeadCoefficients(
    const ScoreRows& rows, const std::vector<double>& gradients_E,
    const std::vector<double>& logprobs_E, const std::vector<double>& slopes_E);

// Entries with the same position in their rows. A layer has at most one entry
// of each row, so adding a layer has no collisions and a fixed order.
struct EntryLayer {
  std::vector<int64_t> rows;  // Counted from `begin`.
  std::vector<int64_t> targets;
  std::vector<double> coefficients;
};

// Returns the layers of the entries of rows [begin, begin + count).
[[nodiscard]] std::vector<EntryLayer> LayerEntries(
    const HeadCoefficients& coefficients, int64_t begin, int64_t count);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
