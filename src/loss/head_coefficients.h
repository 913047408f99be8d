// The factors of the head's vectors in its backward pass, computed on the host,
// one number per entry. Private to loss/.
//
// Legend: R score rows, E score entries.
#ifndef WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
#define WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_

#include <cstdint>
#include <vector>

#include "src/loss/fused_head.h"

namespace weft::loss {

// dz of row r is `entries` at its targets, each named once, and rows_R[r] *
// softmax(z) * D elsewhere.
struct HeadCoefficients {
  std::vector<int64_t> row_offsets;  // [R + 1], into the next two.
  std::vector<int64_t> targets;
  std::vector<double> entries;
  std::vector<double> rows_R;
};

// Merges a row's entries with equal targets. Their coefficients nearly cancel
// for confident predictions, so they are summed before the rounding to f32.
// Arguments: gradients_E = dLoss/dlogprob; slopes_E = D at the targets, empty
// without softcap.
[[nodiscard]] HeadCoefficients MakeHeadCoefficients(
    const ScoreRows& rows, const std::vector<double>& gradients_E,
    const std::vector<double>& logprobs_E, const std::vector<double>& slopes_E);

// Entries with the same position in their rows. A layer has at most one entry
// of each row, so that adding a layer has no collisions and a fixed order.
struct EntryLayer {
  std::vector<int64_t> rows;  // Counted from `begin`.
  std::vector<int64_t> targets;
  std::vector<double> coefficients;
};

// The layers of the entries of rows [begin, begin + count).
[[nodiscard]] std::vector<EntryLayer> LayerEntries(
    const HeadCoefficients& coefficients, int64_t begin, int64_t count);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
