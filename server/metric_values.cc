#include "server/metric_values.h"

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/process_collector.h"

namespace weft {

MetricValues::MetricValues(const prometheus::Registry& registry) {
  Add(registry.Collect());
  Add(ProcessCollector().Collect());
}

void MetricValues::Add(const std::vector<prometheus::MetricFamily>& families) {
  for (const prometheus::MetricFamily& family : families) {
    const bool counts = family.type == prometheus::MetricType::Counter;
    for (const prometheus::ClientMetric& metric : family.metric) {
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

double MetricValues::UptimeSeconds() const {
  const double start = Sum("process_start_time_seconds");
  if (start <= 0) return 0;
  return absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch() -
                               absl::Seconds(start));
}

}  // namespace weft
