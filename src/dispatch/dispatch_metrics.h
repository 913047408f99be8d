// The dispatcher's metrics: queues and waiting times, work by tenant, locations
// of adapters, bytes of stored replies. Threads: any.
#ifndef WEFT_SRC_DISPATCH_DISPATCH_METRICS_H_
#define WEFT_SRC_DISPATCH_DISPATCH_METRICS_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "src/base/observe/metrics.h"
#include "src/dispatch/scheduler.h"
#include "src/request/adapter.h"

namespace weft::dispatch {

class DispatchMetrics {
 public:
  // Each of `tenants` has a label of its own. All other tenants share one
  // label.
  explicit DispatchMetrics(prometheus::Registry* registry,
                           std::vector<std::string> tenants = {});

  void SetQueues(const Scheduler& scheduler);
  void ObserveWait(WorkKind kind, absl::Duration waited);
  // CountTenantTrain counts the tokens of a slice that ran. CountTenantSample
  // counts the tokens of a finished sample request, prompt included.
  void CountTenantTrain(std::string_view tenant, int64_t num_tokens);
  void CountTenantSample(std::string_view tenant, int64_t num_tokens);
  // `by_location` counts adapters in the order of AdapterLocation. `bytes` is
  // the size of all adapters on the device.
  void SetAdapters(const std::array<int, kNumAdapterLocations>& by_location,
                   uint64_t bytes);
  // `counts` is in the order of Durability. The entry of kDefault is not used.
  void SetDurabilities(const std::array<int, kNumDurabilities>& counts);
  void SetRecovering(size_t num_adapters);
  void SetRecoveryTimeLeft(absl::Duration left);
  // Counts a move that has ended. `bytes` count only if `ok`.
  void CountMove(AdapterLocation from, AdapterLocation to, bool ok,
                 uint64_t bytes);
  void ObserveSwapIn(absl::Duration waited);
  void SetStoredReplies(int64_t bytes);
  void CountDroppedReply();

 private:
  size_t LabelOf(std::string_view tenant) const;

  const std::vector<std::string> tenants_;
  LabelledGauges queue_depth_;
  LabelledGauges tenant_queue_depth_;
  LabelledCounters tenant_train_tokens_;
  LabelledCounters tenant_sample_tokens_;
  LabelledHistograms queue_wait_;
  LabelledGauges adapters_;
  LabelledGauges durabilities_;
  prometheus::Gauge& recovering_;
  prometheus::Gauge& recovery_seconds_;
  prometheus::Gauge& adapter_bytes_;
  LabelledCounters moves_;
  LabelledCounters moved_bytes_;
  LabelledCounters failed_moves_;
  prometheus::Histogram& swap_in_;
  prometheus::Gauge& reply_bytes_;
  prometheus::Counter& dropped_replies_;
};

}  // namespace weft::dispatch

#endif  // WEFT_SRC_DISPATCH_DISPATCH_METRICS_H_
