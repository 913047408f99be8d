#include "src/loss/head_coefficients.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace weft::loss {

namespace {

// Entries of row r whose target no earlier entry of the row has.
std::vector<int64_t> FirstOfEachTarget(const ScoreRows& rows, size_t r) {
  std::vector<int64_t> entries(rows.row_offsets[r + 1] - rows.row_offsets[r]);
  std::iota(entries.begin(), entries.end(), rows.row_offsets[r]);
  const auto target = [&rows](int64_t e) { return rows.targets[e]; };
  if (entries.size() > 1) {
    std::ranges::stable_sort(entries, {}, target);
    const auto repeated = std::ranges::unique(entries, {}, target);
    entries.erase(repeated.begin(), repeated.end());
  }
  return entries;
}

}  // namespace

HeadCoefficients MakeHeadCoefficients(const ScoreRows& rows,
                                      std::vector<double> gradients_E,
                                      const std::vector<double>& logprobs_E,
                                      const std::vector<double>& slopes_E) {
  const size_t num_rows = rows.temperatures.size();
  HeadCoefficients result{.entries_E = std::move(gradients_E), .rows_R = {}};
  result.rows_R.reserve(num_rows);
  for (size_t r = 0; r < num_rows; ++r) {
    double sum = 0;
    for (int64_t e = rows.row_offsets[r]; e < rows.row_offsets[r + 1]; ++e) {
      result.entries_E[e] /= static_cast<double>(rows.temperatures[r]);
      sum += result.entries_E[e];
    }
    // A target named twice has one probability: its first entry takes it.
    for (const int64_t e : FirstOfEachTarget(rows, r)) {
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
