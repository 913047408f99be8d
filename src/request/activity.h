// Recent activity of adapters and current load of tenants, for people who watch
// the server.
#ifndef WEFT_SRC_REQUEST_ACTIVITY_H_
#define WEFT_SRC_REQUEST_ACTIVITY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace weft {

// A ForwardBackward that has succeeded.
struct TrainPoint {
  uint64_t step = 0;
  uint64_t optim_steps = 0;  // Before this step.
  absl::Time ended_at;
  // The sum of the losses, divided by the sum of the magnitudes of the data's
  // weights, or by the number of data for a custom loss. If the divisor is 0,
  // it is 1. May be infinite or NaN.
  float loss = 0;
  // The loss has the gradient of what the client optimizes, but its value says
  // nothing: that of a policy, or a cross-entropy with negative weights.
  bool surrogate = false;
  uint32_t num_tokens = 0;
};

// An OptimStep that has succeeded.
struct UpdatePoint {
  uint64_t step = 0;
  float grad_norm = 0;
};

// Values that a client has measured itself.
struct MetricReport {
  std::string adapter_id;
  std::optional<uint64_t> optim_steps;  // None: the adapter's present number.
  std::map<std::string, double> metrics;
};

// The values of one name in the client's reports, in their order.
struct MetricCurve {
  struct Point {
    uint64_t optim_steps = 0;
    float value = 0;
  };
  std::string name;
  std::vector<Point> points;
};

// An adapter has the curves of the names that were reported last.
inline constexpr size_t kMaxMetricCurves = 8;

struct AdapterActivity {
  // Totals since the adapter came into this process: tokens of ForwardBackward
  // and Forward, and drawn tokens of finished samples.
  uint64_t train_tokens = 0;
  uint64_t sampled_tokens = 0;
  std::vector<TrainPoint> points;  // The latest points, in order of `ended_at`.
  std::vector<UpdatePoint> updates;  // The latest updates, in their order.
  std::vector<MetricCurve> curves;   // The latest reports, by name.
};

struct TenantLoad {
  int num_adapters = 0;
  // The bytes that the tensors of all the tenant's adapters would take off the
  // device.
  uint64_t adapter_bytes = 0;
  int64_t queued_requests = 0;  // Requests that have not started.
};

// Asks for the activity of adapters and the load of tenants. The answer has at
// most `max_points` points, updates and points of a curve for each adapter.
struct ActivityQuery {
  std::vector<std::string> adapter_ids;
  std::vector<std::string> tenants;
  size_t max_points = 0;
};

// The entries are in the order of the query. The entry of an unknown name has
// only zeros.
struct Activity {
  std::vector<AdapterActivity> adapters;
  std::vector<TenantLoad> tenants;
};

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_ACTIVITY_H_
