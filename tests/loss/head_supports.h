// Makes supports of score rows, and says which tokens they keep.
#ifndef WEFT_TESTS_LOSS_HEAD_SUPPORTS_H_
#define WEFT_TESTS_LOSS_HEAD_SUPPORTS_H_

#include <ATen/ATen.h>

#include <cstdint>
#include <limits>
#include <set>

#include "src/loss/fused_head.h"

namespace weft::loss {

inline constexpr int64_t kVocab = 211;

// Gives supports to all rows but every fourth one: the row's targets, and 1 to
// 45 other tokens. The fewer they are, the closer they are together, so that
// they may all be on one rank.
inline void AddSupports(ScoreRows& rows) {
  RowSupports& supports = rows.supports;
  supports.offsets = {0};
  for (int64_t r = 0; r + 1 < static_cast<int64_t>(rows.row_offsets.size());
       ++r) {
    if (r % 4 == 3) continue;
    std::set<int64_t> ids(rows.targets.begin() + rows.row_offsets[r],
                          rows.targets.begin() + rows.row_offsets[r + 1]);
    const int64_t first = *ids.begin();
    for (int64_t i = 0; i <= r % 5 * 11; ++i) {
      ids.insert((first + 1 + i * (r % 5)) % kVocab);
    }
    supports.rows.push_back(r);
    supports.ids.insert(supports.ids.end(), ids.begin(), ids.end());
    supports.offsets.push_back(static_cast<int64_t>(supports.ids.size()));
  }
}

// Returns z [R, V] with -inf at the tokens that supports leave out.
inline at::Tensor MaskLogits(const at::Tensor& z, const ScoreRows& rows) {
  const at::Tensor kept = at::ones(z.sizes(), at::kBool);
  const RowSupports& supports = rows.supports;
  for (size_t m = 0; m < supports.rows.size(); ++m) {
    at::Tensor row = kept[supports.rows[m]].zero_();
    for (int64_t i = supports.offsets[m]; i < supports.offsets[m + 1]; ++i) {
      row[supports.ids[i]] = true;
    }
  }
  return z.masked_fill(kept.logical_not(),
                       -std::numeric_limits<double>::infinity());
}

}  // namespace weft::loss

#endif  // WEFT_TESTS_LOSS_HEAD_SUPPORTS_H_
