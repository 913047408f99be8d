#include "src/dispatch/train_history.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace weft::dispatch {
namespace {

// The metric that every loss function gives.
constexpr char kLossSum[] = "loss:sum";

// Returns what a point's loss is divided by, so that requests of different
// sizes have comparable points.
double TotalWeight(const TrainRequest& request) {
  if (request.loss.function == LossFunction::kCustom) {
    return static_cast<double>(request.data.size());
  }
  double total = 0;
  for (const Datum& datum : request.data) {
    if (datum.weights.empty()) {
      total += static_cast<double>(datum.targets.size());
    }
    for (const float weight : datum.weights) total += std::abs(weight);
  }
  return total > 0 ? total : 1;
}

// A client that computes its loss itself sends the loss's gradient as weights
// of a cross-entropy, of both signs.
bool IsSurrogate(const TrainRequest& request) {
  if (HasPolicy(request.loss.function)) return true;
  if (request.loss.function != LossFunction::kCrossEntropy) return false;
  return std::ranges::any_of(request.data, [](const Datum& datum) {
    return std::ranges::any_of(datum.weights,
                               [](float weight) { return weight < 0; });
  });
}

}  // namespace

void TrainHistory::Add(const TrainRequest& request, const TrainResult& result,
                       uint64_t optim_steps, absl::Time now) {
  const auto sum = result.metrics.find(kLossSum);
  if (!request.backward || sum == result.metrics.end()) return;
  trained_.Add({.step = result.step,
                .optim_steps = optim_steps,
                .ended_at = now,
                .loss = static_cast<float>(sum->second / TotalWeight(request)),
                .surrogate = IsSurrogate(request),
                .num_tokens = static_cast<uint32_t>(request.num_tokens())});
}

void TrainHistory::Add(const MetricReport& report, uint64_t optim_steps) {
  ++num_reports_;
  for (const auto& [name, value] : report.metrics) {
    Curve& curve = curves_[name];
    curve.points.Add({.optim_steps = report.optim_steps.value_or(optim_steps),
                      .value = static_cast<float>(value)});
    curve.last_report = num_reports_;
  }
  while (curves_.size() > kMaxMetricCurves) {
    curves_.erase(std::ranges::min_element(curves_, {}, [](const auto& curve) {
      return curve.second.last_report;
    }));
  }
}

AdapterActivity TrainHistory::Latest(size_t max_points) const {
  std::vector<MetricCurve> curves;
  if (max_points > 0) {
    for (const auto& [name, curve] : curves_) {
      curves.push_back(
          {.name = name, .points = curve.points.Latest(max_points)});
    }
  }
  return {.train_tokens = train_tokens_,
          .sampled_tokens = sampled_tokens_,
          .points = trained_.Latest(max_points),
          .updates = updates_.Latest(max_points),
          .curves = std::move(curves)};
}

}  // namespace weft::dispatch
