// The values of the server's metrics at one moment.
#ifndef WEFT_SERVER_CALL_METRIC_VALUES_H_
#define WEFT_SERVER_CALL_METRIC_VALUES_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "prometheus/metric_family.h"
#include "prometheus/registry.h"

namespace weft::server {

// The metrics of a start that restores --state-dir.
inline constexpr char kRestoringMetric[] = "weft_adapters_recovering";
inline constexpr char kRestoreSecondsMetric[] = "weft_recovery_seconds_left";

// A histogram: maps the upper end of each bucket to the number of observations
// that are at most as high.
using Histogram = std::map<double, uint64_t>;

// Returns the quantile `q` of the observations of `now` that are not in
// `before`, an earlier state of the same histogram. Within a bucket they count
// as evenly spread, as in Prometheus. In the last bucket it is the bucket's
// lower end. Returns 0 if there are none.
double Quantile(const Histogram& before, const Histogram& now, double q);

// The values do not change after the constructor, which takes about a
// millisecond.
// Threads: any.
class MetricValues {
 public:
  // Reads the registry's metrics and those of the process.
  explicit MetricValues(const prometheus::Registry& registry);

  // Returns the sum over all labels of a family; 0 if there is no such family.
  double Sum(const std::string& name) const;
  // Returns a map from each value of the family's first label to the sum of the
  // metrics with this label value; empty if there is no such family.
  std::map<std::string, double> ByLabel(const std::string& name) const;
  // Returns the sum of a family's histograms over all labels; empty if there is
  // no such family.
  Histogram Buckets(const std::string& name) const;
  // Returns the seconds since the start of the process; 0 if unknown.
  double UptimeSeconds() const;

 private:
  void Add(const std::vector<prometheus::MetricFamily>& families);

  // Maps a family's name and the value of its first label to a sum of values.
  std::map<std::string, std::map<std::string, double>> values_;
  std::map<std::string, Histogram> histograms_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_METRIC_VALUES_H_
