// What multiplies each vector of the head in its backward pass. Host code: one
// number per entry. Private to loss/.
//
// Legend: R score rows, E score entries.
#ifndef WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
#define WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_

#include <cstdint>
#include <vector>

#include "src/loss/fused_head.h"

namespace weft::loss {

// dz of row r is entries_E[e] at each of its targets (duplicates add up) and
// rows_R[r] * softmax(z) * D elsewhere.
struct HeadCoefficients {
  std::vector<double> entries_E;
  std::vector<double> rows_R;
};

// Arguments: gradients_E = dLoss/dlogprob; slopes_E = D at the targets, empty
// without softcap.
[[nodiscard]] HeadCoefficients MakeHeadCoefficients(
    const ScoreRows& rows, std::vector<double> gradients_E,
    const std::vector<double>& logprobs_E, const std::vector<double>& slopes_E);

// Entries of equal rank within their row: at most one of each row, so that
// adding them to their rows is free of collisions and its order is fixed.
struct EntryLayer {
  std::vector<int64_t> rows;  // Counted from the first row asked for.
  std::vector<int64_t> targets;
  std::vector<double> coefficients;
};

// Of rows [begin, begin + count).
[[nodiscard]] std::vector<EntryLayer> LayerEntries(
    const ScoreRows& rows, const std::vector<double>& entries_E, int64_t begin,
    int64_t count);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
