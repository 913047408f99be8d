#include "src/base/observe/metrics.h"

namespace weft {

prometheus::Counter& AddCounter(prometheus::Registry* registry,
                                const std::string& name,
                                const std::string& help,
                                const prometheus::Labels& labels) {
  return prometheus::BuildCounter()
      .Name(name)
      .Help(help)
      .Register(*registry)
      .Add(labels);
}

prometheus::Gauge& AddGauge(prometheus::Registry* registry,
                            const std::string& name, const std::string& help,
                            const prometheus::Labels& labels) {
  return prometheus::BuildGauge().Name(name).Help(help).Register(*registry).Add(
      labels);
}

prometheus::Histogram& AddHistogram(prometheus::Registry* registry,
                                    const std::string& name,
                                    const std::string& help,
                                    const std::vector<double>& buckets,
                                    const prometheus::Labels& labels) {
  return prometheus::BuildHistogram()
      .Name(name)
      .Help(help)
      .Register(*registry)
      .Add(labels, buckets);
}

std::vector<double> LatencyBuckets() {
  return {.005, .01, .025, .05, .1, .25, .5,  1,
          2.5,  5,   10,   30,  60, 120, 300, 600};
}

std::vector<double> ExponentialBuckets(double first, double factor, int count) {
  std::vector<double> bounds;
  bounds.reserve(static_cast<size_t>(count));
  for (double bound = first; count > 0; --count, bound *= factor) {
    bounds.push_back(bound);
  }
  return bounds;
}

LabelledCounters::LabelledCounters(prometheus::Registry* registry,
                                   const std::string& name,
                                   const std::string& help,
                                   const std::string& label,
                                   const std::vector<std::string>& values) {
  for (const std::string& value : values) {
    children_.push_back(&AddCounter(registry, name, help, {{label, value}}));
  }
}

LabelledGauges::LabelledGauges(prometheus::Registry* registry,
                               const std::string& name, const std::string& help,
                               const std::string& label,
                               const std::vector<std::string>& values) {
  for (const std::string& value : values) {
    children_.push_back(&AddGauge(registry, name, help, {{label, value}}));
  }
}

void LabelledGauges::Select(size_t index) const {
  for (size_t i = 0; i < children_.size(); ++i) {
    children_[i]->Set(i == index ? 1 : 0);
  }
}

LabelledHistograms::LabelledHistograms(prometheus::Registry* registry,
                                       const std::string& name,
                                       const std::string& help,
                                       const std::vector<double>& buckets,
                                       const std::string& label,
                                       const std::vector<std::string>& values) {
  for (const std::string& value : values) {
    children_.push_back(
        &AddHistogram(registry, name, help, buckets, {{label, value}}));
  }
}

}  // namespace weft
