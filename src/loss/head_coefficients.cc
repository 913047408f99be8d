#include "src/loss/head_coefficients.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace weft::loss {
namespace {

// Sets `entries` to the indices of row r's entries, sorted by target.
void TakeEntriesByTarget(const ScoreRows& rows, size_t r,
                         std::vector<int64_t>& entries) {
  entries.resize(rows.row_offsets[r + 1] - rows.row_offsets[r]);
  std::iota(entries.begin(), entries.end(), rows.row_offsets[r]);
  if (entries.size() > 1) {
    std::ranges::stable_sort(entries, {},
                             [&rows](int64_t e) { return rows.targets[e]; });
  }
}

}  // namespace

HeadCoefficients MakeHeadCoefficients(const ScoreRows& rows,
                                      const std::vector<double>& gradients_E,
                                      const std::vector<double>& logprobs_E,
                                      const std::vector<double>& slopes_E) {
  HeadCoefficients result;
  result.row_offsets.reserve(rows.row_offsets.size());
  result.rows_R.reserve(rows.temperatures.size());
  result.targets.reserve(rows.targets.size());
  result.entries.reserve(rows.targets.size());
  result.row_offsets.push_back(0);
  std::vector<int64_t> entries;
  for (size_t r = 0; r < rows.temperatures.size(); ++r) {
    TakeEntriesByTarget(rows, r, entries);
    const auto scale = static_cast<double>(rows.temperatures[r]);
    double sum = 0;
    for (const int64_t e : entries) sum += gradients_E[e] / scale;
    for (size_t i = 0; i < entries.size();) {
      const int64_t first = entries[i];
      const int64_t target = rows.targets[first];
      double own = 0;
      for (; i < entries.size() && rows.targets[entries[i]] == target; ++i) {
        own += gradients_E[entries[i]] / scale;
      }
      const double logprob = logprobs_E[first];
      const double slope = slopes_E.empty() ? 1.0 : slopes_E[first];
      result.targets.push_back(target);
      result.entries.push_back(slope * (own * -std::expm1(logprob) -
                                        (sum - own) * std::exp(logprob)));
    }
    result.row_offsets.push_back(static_cast<int64_t>(result.targets.size()));
    result.rows_R.push_back(-sum);
  }
  return result;
}

std::vector<EntryLayer> LayerEntries(const HeadCoefficients& coefficients,
                                     int64_t begin, int64_t count) {
  std::vector<EntryLayer> layers;
  for (int64_t r = begin; r < begin + count; ++r) {
    const int64_t first = coefficients.row_offsets[r];
    for (int64_t e = first; e < coefficients.row_offsets[r + 1]; ++e) {
      const size_t rank = e - first;
      if (rank == layers.size()) layers.emplace_back();
      layers[rank].rows.push_back(r - begin);
      layers[rank].targets.push_back(coefficients.targets[e]);
      layers[rank].coefficients.push_back(coefficients.entries[e]);
    }
  }
  return layers;
}

}  // namespace weft::loss
