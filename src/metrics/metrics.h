// Prometheus metrics whose label values are fixed at the start. The helpers
// create all children when the program starts, so that recording an event takes
// one atomic operation. A family that added label values at run time would take
// a lock and a map lookup for each event, and could grow without bound.
//
//   Counter& steps = AddCounter(registry, "weft_optim_steps_total", "...");
//   steps.Increment();
//   LabelledCounters rejected(registry, "weft_requests_rejected_total", "...",
//                             "reason", {"invalid", "queue_full"});
//   rejected[1].Increment();
//
// Names use base units (_seconds, _bytes), and counters end in _total. Labels
// are bounded: they never hold ids, prompts or paths.
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

// Returns a child of a family. Equal names and labels give the same object.
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

// Returns the upper bounds of buckets for the latency of a call, from 5 ms to
// 10 min, in seconds.
[[nodiscard]] std::vector<double> LatencyBuckets();

// Returns `count` bounds: first, first * factor, ... REQUIRES: first > 0 and
// factor > 1.
[[nodiscard]] std::vector<double> ExponentialBuckets(double first,
                                                     double factor, int count);

// A family with one label, whose values are known and addressed by index.
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

  // Sets the child at `index` to 1 and all others to 0.
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
