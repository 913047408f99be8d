#include "server/call/metric_values.h"

#include <cmath>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/observe/process_collector.h"

namespace weft::server {

double Quantile(const Histogram& before, const Histogram& now, double q) {
  const auto count = [&before](const auto& bucket) {
    const auto old = before.find(bucket.first);
    return static_cast<double>(bucket.second) -
           (old == before.end() ? 0 : static_cast<double>(old->second));
  };
  const double total = now.empty() ? 0 : count(*now.rbegin());
  if (total <= 0) return 0;
  double low = 0;
  double below = 0;
  for (const auto& bucket : now) {
    const double up_to = count(bucket);
    if (up_to >= q * total) {
      if (std::isinf(bucket.first) || up_to <= below) return low;
      return low + (bucket.first - low) * (q * total - below) / (up_to - below);
    }
    low = bucket.first;
    below = up_to;
  }
  return low;
}

MetricValues::MetricValues(const prometheus::Registry& registry) {
  Add(registry.Collect());
  Add(ProcessCollector().Collect());
}

void MetricValues::Add(const std::vector<prometheus::MetricFamily>& families) {
  for (const prometheus::MetricFamily& family : families) {
    const bool counts = family.type == prometheus::MetricType::Counter;
    for (const prometheus::ClientMetric& metric : family.metric) {
      for (const auto& bucket : metric.histogram.bucket) {
        histograms_[family.name][bucket.upper_bound] += bucket.cumulative_count;
      }
      const std::string label =
          metric.label.empty() ? "" : metric.label.front().value;
      values_[family.name][label] +=
          counts ? metric.counter.value : metric.gauge.value;
    }
  }
}

double MetricValues::Sum(const std::string& name) const {
  double sum = 0;
  for (const auto& [label, value] : ByLabel(name)) sum += value;
  return sum;
}

std::map<std::string, double> MetricValues::ByLabel(
    const std::string& name) const {
  const auto family = values_.find(name);
  return family == values_.end() ? std::map<std::string, double>()
                                 : family->second;
}

Histogram MetricValues::Buckets(const std::string& name) const {
  const auto family = histograms_.find(name);
  return family == histograms_.end() ? Histogram() : family->second;
}

double MetricValues::UptimeSeconds() const {
  const double start = Sum("process_start_time_seconds");
  if (start <= 0) return 0;
  return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch() -
                               absl::Seconds(start));
}

}  // namespace weft::server
