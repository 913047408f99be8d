// The coefficients of the head's backward pass. The host computes one number
// for each entry and each row. Private to src/loss.
//
// Legend: R score rows, E score entries.
#ifndef WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
#define WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_

#include <cstdint>
#include <vector>

#include "src/loss/fused_head.h"

namespace weft::loss {

// Describes dz, the gradient of the logits. At the targets of row r, dz is
// `entries`; each target occurs once. Elsewhere dz is rows_R[r] * softmax * D.
struct HeadCoefficients {
  std::vector<int64_t> row_offsets;  // [R + 1], into `targets` and `entries`.
  std::vector<int64_t> targets;
  std::vector<double> entries;
  std::vector<double> rows_R;
};

// Computes the coefficients. If several entries of a row have the same
// target, merges them. Their coefficients nearly cancel for confident
// predictions, so only the sum may be rounded to f32. `gradients_E` is
// dLoss/dlogprob. `slopes_E` is D at the targets, and empty without softcap.
[[nodiscard]] HeadCoefficients MakeHeadCoefficients(
    const ScoreRows& rows, const std::vector<double>& gradients_E,
    const std::vector<double>& logprobs_E, const std::vector<double>& slopes_E);

// A layer of entries. Layer i has entry i of every row with more than i
// entries. So no two entries of a layer add to the same row. Layers are added
// one after another, so each row's sum has a fixed order.
struct EntryLayer {
  std::vector<int64_t> rows;  // Counted from LayerEntries' `begin`.
  std::vector<int64_t> targets;
  std::vector<double> coefficients;
};

// Returns the layers of the entries of rows [begin, begin + count).
[[nodiscard]] std::vector<EntryLayer> LayerEntries(
    const HeadCoefficients& coefficients, int64_t begin, int64_t count);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_HEAD_COEFFICIENTS_H_
