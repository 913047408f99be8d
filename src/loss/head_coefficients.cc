#include "src/loss/head_coefficients.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace weft::loss {

HeadCoefficients MakeHeadCoefficients(const ScoreRows& rows,
                                      std::vector<double> gradients_E,
                                      const std::vector<double>& logprobs_E,
                                      const std::vector<double>& slopes_E) {
  const size_t num_rows = rows.temperatures.size();
  HeadCoefficients result{.entries_E = std::move(gradients_E), .rows_R = {}};
  result.rows_R.reserve(num_rows);
  for (size_t r = 0; r < num_rows; ++r) {
    const int64_t first = rows.row_offsets[r];
    const int64_t last = rows.row_offsets[r + 1];
    double sum = 0;
    for (int64_t e = first; e < last; ++e) {
      result.entries_E[e] /= static_cast<double>(rows.temperatures[r]);
      sum += result.entries_E[e];
    }
    for (int64_t e = first; e < last; ++e) {
      // A target named twice has one probability: its first entry takes it.
      const auto begin = rows.targets.begin();
      const auto own = begin + e;
      if (std::find(begin + first, own, *own) != own) continue;
      double& c = result.entries_E[e];
      c = c * -std::expm1(logprobs_E[e]) - (sum - c) * std::exp(logprobs_E[e]);
    }
    result.rows_R.push_back(-sum);
  }
  for (size_t e = 0; e < slopes_E.size(); ++e) {
    result.entries_E[e] *= slopes_E[e];
  }
  return result;
}

std::vector<EntryLayer> LayerEntries(const ScoreRows& rows,
                                     const std::vector<double>& entries_E,
                                     int64_t begin, int64_t count) {
  std::vector<EntryLayer> layers;
  for (int64_t r = begin; r < begin + count; ++r) {
    const int64_t first = rows.row_offsets[r];
    for (int64_t e = first; e < rows.row_offsets[r + 1]; ++e) {
      const size_t rank = e - first;
      if (rank == layers.size()) layers.emplace_back();
      layers[rank].rows.push_back(r - begin);
      layers[rank].targets.push_back(rows.targets[e]);
      layers[rank].coefficients.push_back(entries_E[e]);
    }
  }
  return layers;
}

}  // namespace weft::loss
