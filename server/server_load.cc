#include "server/server_load.h"

namespace weft {

void FillLoad(const MetricValues& values, v1::ServerLoad* load) {
  const auto count = [&values](const char* name) {
    return static_cast<uint64_t>(values.Sum(name));
  };
  load->set_uptime_seconds(values.UptimeSeconds());
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
