// Prometheus metrics whose label values are fixed at the start. These helpers
// create every child when the program starts, so that an event is recorded by
// one atomic operation. A family that adds label values at run time takes a
// lock and looks up a map for each event, and it grows without bound.
//
//   Counter& steps = AddCounter(registry, "weft_optim_steps_total", "...");
//   steps.Increment();
//   LabelledCounters rejected(registry, "weft_requests_rejected_total", "...",
//                             "reason", {"invalid", "queue_full"});
//   rejected[1].Increment();
//
// Naming: base units (_seconds, _bytes), counters end in _total, labels are
// bounded (never ids, prompts or paths).
// Threads: the references may be used from any thread and live as long as the
// registry.
#ifndef WEFT_SRC_METRICS_METRICS_H_
#define WEFT_SRC_METRICS_METRICS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/labels.h"
#include "prometheus/registry.h"

namespace weft {

// Returns a child of a family, the same object for equal names and labels.
// Throws std::invalid_argument for a malformed name.
[[nodiscard]] prometheus::Counter& AddCounter(
    prometheus::Registry* registry, const std::string& name,
    const std::string& help, const prometheus::Labels& labels = {});
[[nodiscard]] prometheus::Gauge& AddGauge(
    prometheus::Registry* registry, const std::string& name,
    const std::string& help, const prometheus::Labels& labels = {});
[[nodiscard]] prometheus::Histogram& AddHistogram(
    prometheus::Registry* registry, const std::string& name,
    const std::string& help, const std::vector<double>& buckets,
    const prometheus::Labels& labels = {});

// Upper bounds for the latency of a call, 5 ms to 10 min, in seconds.
[[nodiscard]] std::vector<double> LatencyBuckets();

// `count` bounds: first, first * factor, ... Needs first > 0 and factor > 1.
[[nodiscard]] std::vector<double> ExponentialBuckets(double first,
                                                     double factor, int count);

// A family with one label of known values, addressed by their index.
template <typename Metric>
class Labelled {
 public:
  [[nodiscard]] Metric& operator[](size_t index) const {
    return *children_.at(index);
  }
  [[nodiscard]] size_t size() const { return children_.size(); }

 protected:
  std::vector<Metric*> children_;
};

class LabelledCounters final : public Labelled<prometheus::Counter> {
 public:
  LabelledCounters(prometheus::Registry* registry, const std::string& name,
                   const std::string& help, const std::string& label,
                   const std::vector<std::string>& values);
};

class LabelledGauges final : public Labelled<prometheus::Gauge> {
 public:
  LabelledGauges(prometheus::Registry* registry, const std::string& name,
                 const std::string& help, const std::string& label,
                 const std::vector<std::string>& values);

  // One-hot: 1 at `index`, 0 elsewhere.
  void Select(size_t index) const;
};

class LabelledHistograms final : public Labelled<prometheus::Histogram> {
 public:
  LabelledHistograms(prometheus::Registry* registry, const std::string& name,
                     const std::string& help,
                     const std::vector<double>& buckets,
                     const std::string& label,
                     const std::vector<std::string>& values);
};

}  // namespace weft

#endif  // WEFT_SRC_METRICS_METRICS_H_
