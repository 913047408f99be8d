// Prometheus metrics whose label values are fixed at the start. The
// constructors of Labelled classes create the metric of every label value. So
// an event needs no lookup of its metric, and no family grows without bound.
//
//   Counter& steps = AddCounter(registry, "weft_optim_steps_total", "...");
//   steps.Increment();
//   LabelledCounters rejected(registry, "weft_requests_rejected_total", "...",
//                             "reason", {"invalid", "too_large"});
//   rejected[1].Increment();
//
// Names use base units (_seconds, _bytes), and counters end in _total. Labels
// are bounded: they never hold ids, prompts or paths.
// Threads: any thread may use the returned references, which live as long as
// the registry.
#ifndef WEFT_SRC_BASE_OBSERVE_METRICS_H_
#define WEFT_SRC_BASE_OBSERVE_METRICS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "prometheus/counter.h"
#include "prometheus/gauge.h"
#include "prometheus/histogram.h"
#include "prometheus/labels.h"
#include "prometheus/registry.h"

namespace weft {

// Returns the metric with this name and these labels, and creates it if needed.
// Throws std::invalid_argument, for example for a malformed name or for a name
// that a metric of another type has.
prometheus::Counter& AddCounter(prometheus::Registry* registry,
                                const std::string& name,
                                const std::string& help,
                                const prometheus::Labels& labels = {});
prometheus::Gauge& AddGauge(prometheus::Registry* registry,
                            const std::string& name, const std::string& help,
                            const prometheus::Labels& labels = {});
prometheus::Histogram& AddHistogram(prometheus::Registry* registry,
                                    const std::string& name,
                                    const std::string& help,
                                    const std::vector<double>& buckets,
                                    const prometheus::Labels& labels = {});

// Returns upper bounds of histogram buckets for the latency of a call, in
// seconds: from 5 ms to 10 min.
std::vector<double> LatencyBuckets();

// Returns `count` bounds: first, first * factor, first * factor^2, ...
// REQUIRES: first > 0 and factor > 1.
std::vector<double> ExponentialBuckets(double first, double factor, int count);

// The metrics of a family with one label. operator[] takes the index of a label
// value in the constructor's `values`.
template <typename Metric>
class Labelled {
 public:
  Metric& operator[](size_t index) const { return *children_.at(index); }
  size_t size() const { return children_.size(); }

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

  // Sets the gauge at `index` to 1 and all others to 0.
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

#endif  // WEFT_SRC_BASE_OBSERVE_METRICS_H_
