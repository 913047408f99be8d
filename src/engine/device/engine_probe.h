// The engine's metrics. Recording an event does not allocate. A histogram takes
// its own lock for a moment; counters and gauges take none.
#ifndef WEFT_SRC_ENGINE_DEVICE_ENGINE_PROBE_H_
#define WEFT_SRC_ENGINE_DEVICE_ENGINE_PROBE_H_

#include <atomic>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "src/base/clock.h"
#include "src/base/observe/metrics.h"

namespace weft::engine {

// Threads: any.
class EngineProbe {
 public:
  // `registry` outlives the object.
  explicit EngineProbe(prometheus::Registry* registry) : registry_(registry) {}

  void Heartbeat();
  // Returns the time of the last Heartbeat. Before the first one, returns the
  // time of construction.
  absl::Time last_heartbeat() const {
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
  enum Phase : size_t { kTrain, kForward, kOptim, kPrefill, kDecode };
  enum Batch : size_t { kTrainBatch, kPrefillBatch, kDecodeBatch };

  static std::vector<double> StepBuckets() {
    return ExponentialBuckets(0.001, 2, 18);
  }

  prometheus::Registry* const registry_;
  std::atomic<int64_t> last_heartbeat_ns_{absl::ToUnixNanos(SteadyNow())};
  prometheus::Gauge& heartbeat_ =
      AddGauge(registry_, "weft_engine_heartbeat_timestamp_seconds",
               "Unix time at which the engine thread last finished work or "
               "found none.");
  prometheus::Counter& train_tokens_ =
      AddCounter(registry_, "weft_train_tokens_total",
                 "Tokens of ForwardBackward and Forward.");
  prometheus::Counter& prompt_tokens_ =
      AddCounter(registry_, "weft_prompt_tokens_total",
                 "Tokens prefilled, without those that the prefix cache had; "
                 "after a preemption they count again.");
  prometheus::Counter& sampled_tokens_ =
      AddCounter(registry_, "weft_sampled_tokens_total", "Tokens drawn.");
  prometheus::Counter& prefix_lookup_tokens_ = AddCounter(
      registry_, "weft_prefix_cache_lookup_tokens_total",
      "Tokens of prompts and of preempted sequences to be prefilled.");
  prometheus::Counter& prefix_hit_tokens_ =
      AddCounter(registry_, "weft_prefix_cache_hit_tokens_total",
                 "Tokens to be prefilled that the prefix cache had.");
  prometheus::Counter& preemptions_ =
      AddCounter(registry_, "weft_sample_preemptions_total",
                 "Sequences that lost their key/value pages to older ones and "
                 "are prefilled again.");
  LabelledHistograms batch_tokens_{registry_,
                                   "weft_batch_tokens",
                                   "Tokens of a device batch, by kind.",
                                   ExponentialBuckets(1, 2, 17),
                                   "kind",
                                   {"train", "prefill", "decode"}};
  LabelledHistograms step_seconds_{
      registry_,
      "weft_step_seconds",
      "Duration of a device batch, by phase.",
      StepBuckets(),
      "phase",
      {"train", "forward", "optim", "prefill", "decode"}};
  LabelledCounters decode_iterations_{registry_,
                                      "weft_decode_iterations_total",
                                      "Decode iterations, with the layers "
                                      "and the head as one CUDA graph, or "
                                      "as separate launches.",
                                      "way",
                                      {"graph", "launches"}};
  prometheus::Gauge& decode_graphs_ =
      AddGauge(registry_, "weft_decode_graphs",
               "Recorded CUDA graphs of decode iterations.");
  prometheus::Gauge& decode_graph_bytes_ =
      AddGauge(registry_, "weft_decode_graph_bytes",
               "Device memory that the recorded graphs take.");
  prometheus::Histogram& first_token_ =
      AddHistogram(registry_, "weft_time_to_first_token_seconds",
                   "Time from acceptance to the first token.", StepBuckets());
  prometheus::Gauge& kv_used_ =
      AddGauge(registry_, "weft_kv_cache_used_bytes",
               "Bytes of key/value pages that sequences use.");
  prometheus::Gauge& prefix_bytes_ =
      AddGauge(registry_, "weft_prefix_cache_bytes",
               "Bytes of key/value pages of remembered prefixes, "
               "in use or not.");
  prometheus::Gauge& kv_capacity_ =
      AddGauge(registry_, "weft_kv_cache_capacity_bytes",
               "Bytes of all key/value pages.");
  prometheus::Gauge& states_used_ =
      AddGauge(registry_, "weft_state_cache_used_bytes",
               "Bytes of recurrent states that sequences use; 0 "
               "if the model has none.");
  prometheus::Gauge& state_capacity_ =
      AddGauge(registry_, "weft_state_cache_capacity_bytes",
               "Bytes of all recurrent states.");
  prometheus::Gauge& device_total_ =
      AddGauge(registry_, "weft_device_memory_bytes",
               "Memory of rank 0's CUDA device; 0 on the CPU.");
  prometheus::Gauge& device_reserved_ =
      AddGauge(registry_, "weft_device_reserved_bytes",
               "Memory of the device that weftd has taken; 0 on the CPU.");
  prometheus::Gauge& device_allocated_ =
      AddGauge(registry_, "weft_device_allocated_bytes",
               "Memory of the device that tensors use; 0 on the CPU.");
  prometheus::Counter& optim_steps_ =
      AddCounter(registry_, "weft_optim_steps_total", "OptimSteps applied.");
  prometheus::Histogram& grad_norm_ = AddHistogram(
      registry_, "weft_grad_norm", "Gradient norm before clipping.",
      ExponentialBuckets(1e-4, 4, 16));
  prometheus::Counter& nonfinite_ =
      AddCounter(registry_, "weft_nonfinite_total",
                 "OptimSteps refused because a gradient, or its square in "
                 "f32, is not finite.");
  prometheus::Counter& clipped_ =
      AddCounter(registry_, "weft_grad_clipped_total",
                 "OptimSteps whose gradient was clipped.");
  prometheus::Counter& out_of_memory_ =
      AddCounter(registry_, "weft_out_of_memory_total",
                 "Micro-batches that ran out of memory, whether or not they "
                 "ran again.");
  // The first bucket counts experts without rows.
  prometheus::Histogram& expert_load_ =
      AddHistogram(registry_, "weft_expert_load_ratio",
                   "Rows of an expert in a training micro-batch over the mean "
                   "of its layer; le=0 counts experts without rows.",
                   {0, 0.25, 0.5, 1, 1.5, 2, 4, 8, 16});
  prometheus::Gauge& expert_imbalance_ =
      AddGauge(registry_, "weft_expert_imbalance",
               "Largest weft_expert_load_ratio in the last micro-batch; 1 "
               "means that all experts have equally many rows.");
  LabelledCounters checkpoints_{
      registry_,
      "weft_checkpoints_total",
      "Checkpoints written or read, by operation and outcome.",
      "outcome",
      {"save_ok", "save_error", "load_ok", "load_error"}};
  LabelledHistograms checkpoint_seconds_{
      registry_,
      "weft_checkpoint_seconds",
      "Duration of writing or reading a checkpoint.",
      StepBuckets(),
      "op",
      {"save", "load"}};
  prometheus::Gauge& last_checkpoint_ =
      AddGauge(registry_, "weft_checkpoint_last_success_timestamp_seconds",
               "Unix time of the last checkpoint written; 0: none.");
  prometheus::Gauge& stored_checkpoints_ =
      AddGauge(registry_, "weft_checkpoint_store_bytes",
               "Bytes of all checkpoints that are listed, counted at the "
               "start and with each save, upload and deletion.");
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_DEVICE_ENGINE_PROBE_H_
