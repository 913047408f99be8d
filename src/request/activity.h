// Recent activity of adapters and current load of tenants, for people who watch
// the server.
#ifndef WEFT_SRC_REQUEST_ACTIVITY_H_
#define WEFT_SRC_REQUEST_ACTIVITY_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace weft {

// A ForwardBackward that has succeeded.
struct TrainPoint {
  uint64_t step = 0;
  absl::Time ended_at;
  // The sum of the losses, divided by the sum of the magnitudes of the data's
  // weights. If the magnitudes sum to 0, the divisor is 1. May be infinite or
  // NaN.
  float loss = 0;
  uint32_t num_tokens = 0;
};

// An OptimStep that has succeeded.
struct UpdatePoint {
  uint64_t step = 0;
  float grad_norm = 0;
};

struct AdapterActivity {
  // Totals since the adapter came into this process: tokens of ForwardBackward
  // and Forward, and drawn tokens of finished samples.
  uint64_t train_tokens = 0;
  uint64_t sampled_tokens = 0;
  std::vector<TrainPoint> points;  // The latest points, in order of `ended_at`.
  std::vector<UpdatePoint> updates;  // The latest updates, in their order.
};

struct TenantLoad {
  int num_adapters = 0;
  // The bytes that the tensors of all the tenant's adapters would take off the
  // device.
  uint64_t adapter_bytes = 0;
  int64_t queued_requests = 0;  // Requests that have not started.
};

// Asks for the activity of adapters and the load of tenants. The answer has at
// most `max_points` points, and as many updates, for each adapter.
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
