#include "src/dispatch/train_history.h"

#include <algorithm>
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
  const TrainPoint point = {
      .step = result.step,
      .ended_at = now,
      .loss = static_cast<float>(sum->second / TotalWeight(request)),
      .num_tokens = static_cast<uint32_t>(request.num_tokens())};
  if (ring_.size() < kMaxPoints) {
    ring_.push_back(point);
    return;
  }
  ring_[oldest_] = point;
  oldest_ = (oldest_ + 1) % kMaxPoints;
}

AdapterActivity TrainHistory::Latest(size_t max_points) const {
  AdapterActivity activity{.train_tokens = train_tokens_,
                           .sampled_tokens = sampled_tokens_,
                           .points = {}};
  const size_t count = std::min(max_points, ring_.size());
  activity.points.reserve(count);
  for (size_t i = ring_.size() - count; i < ring_.size(); ++i) {
    activity.points.push_back(ring_[(oldest_ + i) % ring_.size()]);
  }
  return activity;
}

}  // namespace weft::dispatch
