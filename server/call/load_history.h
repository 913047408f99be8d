// Remembers what the server did in the last ten minutes, for people who look
// when something has happened.
#ifndef WEFT_SERVER_CALL_LOAD_HISTORY_H_
#define WEFT_SERVER_CALL_LOAD_HISTORY_H_

#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "prometheus/registry.h"
#include "server/call/metric_values.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// The histograms whose recent quantiles LoadHistory knows.
inline constexpr char kQueueWaitMetric[] = "weft_queue_wait_seconds";
inline constexpr char kFirstTokenMetric[] = "weft_time_to_first_token_seconds";

class LoadHistory {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(5);
  static constexpr absl::Duration kLength = absl::Minutes(10);

  // The mean rates of an interval, and the wall time of its end.
  struct Rates {
    absl::Time at;
    double train_tokens = 0;  // Per second.
    double sampled_tokens = 0;
  };

  // Reads the metrics if kInterval has passed since the last reading. `now` is
  // a SteadyNow. Call it often. Threads: any.
  void Record(absl::Time now, const prometheus::Registry& registry);
  // Returns the rates, the oldest first. Threads: any.
  std::vector<Rates> rates() const;
  // Returns the quantile `q` of what one of the histograms above has observed
  // within kLength, up to `now`; 0 if nothing. Threads: any.
  double Recent(const MetricValues& now, const std::string& name,
                double q) const;

 private:
  // Not all MetricValues, because their number grows with that of tenants.
  struct Reading {
    absl::Time steady;
    absl::Time wall;
    double train_tokens = 0;  // Totals.
    double sampled_tokens = 0;
    std::map<std::string, Histogram> histograms;
  };

  mutable Mutex mu_;
  std::deque<Reading> readings_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::server

#endif  // WEFT_SERVER_CALL_LOAD_HISTORY_H_
