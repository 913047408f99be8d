#include "server/server_load.h"

#include <map>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/metrics/process_collector.h"

namespace weft {
namespace {

// Adds the values of each family of counters and gauges to its sum.
void AddSums(const std::vector<prometheus::MetricFamily>& families,
             std::map<std::string, double>* sums) {
  for (const prometheus::MetricFamily& family : families) {
    double& sum = (*sums)[family.name];
    const bool counts = family.type == prometheus::MetricType::Counter;
    for (const prometheus::ClientMetric& metric : family.metric) {
      sum += counts ? metric.counter.value : metric.gauge.value;
    }
  }
}

}  // namespace

void FillLoad(const prometheus::Registry& registry, v1::ServerLoad* load) {
  std::map<std::string, double> sums;
  AddSums(registry.Collect(), &sums);
  AddSums(ProcessCollector().Collect(), &sums);
  const auto count = [&sums](const char* name) {
    return static_cast<uint64_t>(sums[name]);
  };
  const double start = sums["process_start_time_seconds"];
  if (start > 0) {
    load->set_uptime_seconds(absl::ToDoubleSeconds(
        absl::Now() - absl::UnixEpoch() - absl::Seconds(start)));
  }
  load->set_calls_in_flight(count("weft_requests_inflight"));
  load->set_queued_requests(count("weft_queue_depth"));
  load->set_train_tokens(count("weft_train_tokens_total"));
  load->set_prompt_tokens(count("weft_prompt_tokens_total"));
  load->set_sampled_tokens(count("weft_sampled_tokens_total"));
  load->set_optim_steps(count("weft_optim_steps_total"));
  load->set_process_bytes(count("process_resident_memory_bytes"));
  load->set_device_total_bytes(count("weft_device_memory_bytes"));
  load->set_device_used_bytes(count("weft_device_allocated_bytes"));
  load->set_kv_total_bytes(count("weft_kv_cache_capacity_bytes"));
  load->set_kv_used_bytes(count("weft_kv_cache_used_bytes"));
}

}  // namespace weft
