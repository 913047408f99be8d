// The engine's metrics. Recording an event does not allocate. A histogram takes
// its own lock for a moment; counters and gauges take none.
#ifndef WEFT_SRC_ENGINE_ENGINE_PROBE_H_
#define WEFT_SRC_ENGINE_ENGINE_PROBE_H_

#include <atomic>
#include <cstdint>
#include <string_view>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/base/clock.h"
#include "src/base/metrics.h"

namespace weft::engine {

// Threads: any.
class EngineProbe {
 public:
  explicit EngineProbe(prometheus::Registry* registry);

  void Heartbeat();
  // Returns the time of the last Heartbeat. Before the first one, returns the
  // time of construction.
  [[nodiscard]] absl::Time last_heartbeat() const {
    return absl::FromUnixNanos(last_heartbeat_ns_.load());
  }

  void ObserveTrain(bool backward, int64_t num_tokens, absl::Duration elapsed);
  // `rows` has each expert's number of rows in a micro-batch, layer by layer,
  // for the layers with experts. It is not empty. `num_experts` is the number
  // of experts of each such layer.
  void ObserveExperts(absl::Span<const int64_t> rows, size_t num_experts);
  // `fits`: false if the step was refused because of its gradient.
  // `max_grad_norm`: 0 without clipping.
  void ObserveOptim(bool fits, double grad_norm, double max_grad_norm,
                    absl::Duration elapsed);
  // Counts a micro-batch that ran out of memory, even if the micro-batch then
  // runs again.
  void CountOutOfMemory();
  void ObservePrefill(int64_t num_tokens, absl::Duration elapsed);
  void ObserveDecode(int64_t num_tokens, bool by_graph, absl::Duration elapsed);
  void SetDecodeGraphs(int64_t graphs, int64_t bytes);
  void ObserveFirstToken(absl::Duration since_accepted);
  void CountSampledToken();
  // Counts the tokens of a sequence that is about to be prefilled. The prefix
  // cache held `num_found` of them.
  void CountPrefixLookup(int64_t num_tokens, int64_t num_found);
  void CountPreemption();
  void SetKvBytes(int64_t used, int64_t prefixes, int64_t capacity);
  void SetStateBytes(int64_t used, int64_t capacity);
  // The arguments are those of DeviceMemory, in bytes.
  void SetDeviceMemory(int64_t total, int64_t reserved, int64_t allocated);
  // `op` is "save" or "load".
  void ObserveCheckpoint(std::string_view op, bool ok, absl::Duration elapsed);
  void SetStoredCheckpoints(uint64_t bytes);

 private:
  std::atomic<int64_t> last_heartbeat_ns_{absl::ToUnixNanos(SteadyNow())};
  prometheus::Gauge& heartbeat_;
  prometheus::Counter& train_tokens_;
  prometheus::Counter& prompt_tokens_;
  prometheus::Counter& sampled_tokens_;
  prometheus::Counter& prefix_lookup_tokens_;
  prometheus::Counter& prefix_hit_tokens_;
  prometheus::Counter& preemptions_;
  LabelledHistograms batch_tokens_;
  LabelledHistograms step_seconds_;
  LabelledCounters decode_iterations_;
  prometheus::Gauge& decode_graphs_;
  prometheus::Gauge& decode_graph_bytes_;
  prometheus::Histogram& first_token_;
  prometheus::Gauge& kv_used_;
  prometheus::Gauge& prefix_bytes_;
  prometheus::Gauge& kv_capacity_;
  prometheus::Gauge& states_used_;
  prometheus::Gauge& state_capacity_;
  prometheus::Gauge& device_total_;
  prometheus::Gauge& device_reserved_;
  prometheus::Gauge& device_allocated_;
  prometheus::Counter& optim_steps_;
  prometheus::Histogram& grad_norm_;
  prometheus::Counter& nonfinite_;
  prometheus::Counter& clipped_;
  prometheus::Counter& out_of_memory_;
  prometheus::Histogram& expert_load_;
  prometheus::Gauge& expert_imbalance_;
  LabelledCounters checkpoints_;
  LabelledHistograms checkpoint_seconds_;
  prometheus::Gauge& last_checkpoint_;
  prometheus::Gauge& stored_checkpoints_;
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_ENGINE_PROBE_H_
