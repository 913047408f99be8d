// The values of the server's counters and gauges at one moment.
#ifndef WEFT_SERVER_METRIC_VALUES_H_
#define WEFT_SERVER_METRIC_VALUES_H_

#include <map>
#include <string>
#include <vector>

#include "prometheus/metric_family.h"
#include "prometheus/registry.h"

namespace weft {

// The values do not change after the constructor, which takes about a
// millisecond.
// Threads: any.
class MetricValues {
 public:
  // Reads the registry's metrics and those of the process.
  explicit MetricValues(const prometheus::Registry& registry);

  // Returns the sum over all labels of a family; 0 if there is no such family.
  [[nodiscard]] double Sum(const std::string& name) const;
  // Returns a map from each value of the family's first label to the sum of the
  // metrics with this label value; empty if there is no such family.
  [[nodiscard]] std::map<std::string, double> ByLabel(
      const std::string& name) const;
  // Returns the seconds since the start of the process; 0 if unknown.
  [[nodiscard]] double UptimeSeconds() const;

 private:
  void Add(const std::vector<prometheus::MetricFamily>& families);

  // Maps a family's name and the value of its first label to a sum of values.
  std::map<std::string, std::map<std::string, double>> values_;
};

}  // namespace weft

#endif  // WEFT_SERVER_METRIC_VALUES_H_
