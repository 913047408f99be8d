#include "src/dispatch/dispatch_metrics.h"

#include <algorithm>
#include <utility>

#include "src/base/options/options.h"

namespace weft::dispatch {
namespace {

// The names of WorkKind, in its order.
const std::vector<std::string> kKinds = {"train", "optim", "io", "sample"};

std::vector<std::string> TenantLabels(std::vector<std::string> tenants) {
  tenants.emplace_back(kOtherTenants);
  return tenants;
}

// The names of AdapterLocation, in its order.
const std::vector<std::string> kLocations = {"device", "host", "disk"};

// The names of Durability, in its order, without kDefault.
const std::vector<std::string> kDurabilities = {"memory", "step"};

enum Direction : size_t {
  kDeviceToHost,
  kDeviceToDisk,
  kHostToDisk,
  kHostToDevice,
  kDiskToDevice
};
const std::vector<std::string> kDirections = {
    "device_to_host", "device_to_disk", "host_to_disk", "host_to_device",
    "disk_to_device"};

Direction DirectionOf(AdapterLocation from, AdapterLocation to) {
  if (to == AdapterLocation::kDevice) {
    return from == AdapterLocation::kHost ? kHostToDevice : kDiskToDevice;
  }
  if (to == AdapterLocation::kHost) return kDeviceToHost;
  return from == AdapterLocation::kHost ? kHostToDisk : kDeviceToDisk;
}

std::vector<double> WaitBuckets() { return ExponentialBuckets(0.001, 2, 18); }

}  // namespace

DispatchMetrics::DispatchMetrics(prometheus::Registry* registry,
                                 std::vector<std::string> tenants)
    : tenants_(std::move(tenants)),
      queue_depth_(registry, "weft_queue_depth", "Requests that wait, by kind.",
                   "kind", kKinds),
      tenant_queue_depth_(registry, "weft_tenant_queue_depth",
                          "Requests that wait, by tenant of --tenant-weights; "
                          "other counts those of all other tenants.",
                          "tenant", TenantLabels(tenants_)),
      tenant_train_tokens_(registry, "weft_tenant_train_tokens_total",
                           "Tokens of ForwardBackward and Forward, by tenant "
                           "of --tenant-weights.",
                           "tenant", TenantLabels(tenants_)),
      tenant_sample_tokens_(registry, "weft_tenant_sample_tokens_total",
                            "Tokens of finished samples and their prompts, by "
                            "tenant of --tenant-weights.",
                            "tenant", TenantLabels(tenants_)),
      queue_wait_(registry, "weft_queue_wait_seconds",
                  "Time from acceptance to start. A small batch of training "
                  "waits up to 5 ms for adapters that train in step with it.",
                  WaitBuckets(), "kind", kKinds),
      adapters_(registry, "weft_adapters",
                "Adapters, by the place of their tensors.", "location",
                kLocations),
      durabilities_(registry, "weft_adapters_by_durability",
                    "Adapters, by what of them survives a restart.",
                    "durability", kDurabilities),
      recovering_(AddGauge(registry, "weft_adapters_recovering",
                           "Adapters that a start has not restored yet.")),
      recovery_seconds_(AddGauge(registry, "weft_recovery_seconds_left",
                                 "Estimated seconds until a start has "
                                 "restored all adapters, from the part of the "
                                 "log read so far; 0 if unknown.")),
      adapter_bytes_(AddGauge(registry, "weft_adapter_bytes",
                              "Bytes of all adapters on the device.")),
      moves_(registry, "weft_adapter_moves_total",
             "Adapters moved, by direction.", "direction", kDirections),
      moved_bytes_(registry, "weft_adapter_moved_bytes_total",
                   "Bytes of adapters moved, by direction.", "direction",
                   kDirections),
      failed_moves_(registry, "weft_adapter_move_failures_total",
                    "Moves of adapters that failed; the adapter stays where "
                    "it was.",
                    "direction", kDirections),
      swap_in_(AddHistogram(registry, "weft_adapter_swap_in_seconds",
                            "Time from the first work for an adapter that is "
                            "not on the device until it is there.",
                            WaitBuckets())),
      reply_bytes_(AddGauge(registry, "weft_stored_reply_bytes",
                            "Bytes of replies kept for repeated steps.")),
      dropped_replies_(AddCounter(registry, "weft_stored_replies_dropped_total",
                                  "Replies dropped early, from the tenant "
                                  "with the most bytes, because all together "
                                  "reached --max-stored-reply-bytes.")) {}

void DispatchMetrics::SetQueues(const Scheduler& scheduler) {
  int64_t others = 0;
  for (int kind = 0; kind < kNumWorkKinds; ++kind) {
    const int64_t depth = scheduler.QueueDepth(static_cast<WorkKind>(kind));
    queue_depth_[kind].Set(static_cast<double>(depth));
    others += depth;
  }
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const int64_t depth = scheduler.QueueDepthOf(tenants_[i]);
    tenant_queue_depth_[i].Set(static_cast<double>(depth));
    others -= depth;
  }
  tenant_queue_depth_[tenants_.size()].Set(static_cast<double>(others));
}

size_t DispatchMetrics::LabelOf(std::string_view tenant) const {
  return static_cast<size_t>(std::ranges::find(tenants_, tenant) -
                             tenants_.begin());
}

void DispatchMetrics::CountTenantTrain(std::string_view tenant,
                                       int64_t num_tokens) {
  tenant_train_tokens_[LabelOf(tenant)].Increment(
      static_cast<double>(num_tokens));
}

void DispatchMetrics::CountTenantSample(std::string_view tenant,
                                        int64_t num_tokens) {
  tenant_sample_tokens_[LabelOf(tenant)].Increment(
      static_cast<double>(num_tokens));
}

void DispatchMetrics::SetAdapters(
    const std::array<int, kNumAdapterLocations>& by_location, uint64_t bytes) {
  for (size_t i = 0; i < by_location.size(); ++i) {
    adapters_[i].Set(by_location[i]);
  }
  adapter_bytes_.Set(static_cast<double>(bytes));
}

void DispatchMetrics::SetDurabilities(
    const std::array<int, kNumDurabilities>& counts) {
  for (size_t i = 1; i < counts.size(); ++i) {
    durabilities_[i - 1].Set(counts[i]);
  }
}

void DispatchMetrics::SetRecovering(size_t num_adapters) {
  recovering_.Set(static_cast<double>(num_adapters));
}

void DispatchMetrics::SetRecoveryTimeLeft(absl::Duration left) {
  recovery_seconds_.Set(absl::ToDoubleSeconds(left));
}

void DispatchMetrics::CountMove(AdapterLocation from, AdapterLocation to,
                                bool ok, uint64_t bytes) {
  const Direction direction = DirectionOf(from, to);
  if (!ok) {
    failed_moves_[direction].Increment();
    return;
  }
  moves_[direction].Increment();
  moved_bytes_[direction].Increment(static_cast<double>(bytes));
}

void DispatchMetrics::ObserveSwapIn(absl::Duration waited) {
  swap_in_.Observe(absl::ToDoubleSeconds(waited));
}

void DispatchMetrics::ObserveWait(WorkKind kind, absl::Duration waited) {
  queue_wait_[static_cast<size_t>(kind)].Observe(absl::ToDoubleSeconds(waited));
}

void DispatchMetrics::SetStoredReplies(int64_t bytes) {
  reply_bytes_.Set(static_cast<double>(bytes));
}

void DispatchMetrics::CountDroppedReply() { dropped_replies_.Increment(); }

}  // namespace weft::dispatch
