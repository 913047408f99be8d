#include "src/dispatch/train_history.h"

#include <cmath>

namespace weft::dispatch {
namespace {

// The metric that every loss function gives.
constexpr char kLossSum[] = "loss:sum";

// Returns the sum of the weights' magnitudes, or 1 if the sum is 0. A point's
// loss is divided by this sum, so that requests of different sizes have
// comparable points.
double TotalWeight(const TrainRequest& request) {
  double total = 0;
  for (const Datum& datum : request.data) {
    if (datum.weights.empty()) {
      total += static_cast<double>(datum.targets.size());
    }
    for (const float weight : datum.weights) total += std::abs(weight);
  }
  return total > 0 ? total : 1;
}

}  // namespace

void TrainHistory::Add(const TrainRequest& request, const TrainResult& result,
                       absl::Time now) {
  const auto sum = result.metrics.find(kLossSum);
  if (!request.backward || sum == result.metrics.end()) return;
  trained_.Add({.step = result.step,
                .ended_at = now,
                .loss = static_cast<float>(sum->second / TotalWeight(request)),
                .num_tokens = static_cast<uint32_t>(request.num_tokens())});
}

AdapterActivity TrainHistory::Latest(size_t max_points) const {
  return {.train_tokens = train_tokens_,
          .sampled_tokens = sampled_tokens_,
          .points = trained_.Latest(max_points),
          .updates = updates_.Latest(max_points)};
}

}  // namespace weft::dispatch
