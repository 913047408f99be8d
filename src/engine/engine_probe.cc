#include "src/engine/engine_probe.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/time/clock.h"
#include "src/base/clock.h"

namespace weft::engine {
namespace {

enum Phase : size_t { kTrain, kForward, kOptim, kPrefill, kDecode };
const std::vector<std::string> kPhases = {"train", "forward", "optim",
                                          "prefill", "decode"};

enum Batch : size_t { kTrainBatch, kPrefillBatch, kDecodeBatch };
const std::vector<std::string> kBatches = {"train", "prefill", "decode"};

// Each label value combines an operation on checkpoints and its outcome.
const std::vector<std::string> kCheckpointOutcomes = {"save_ok", "save_error",
                                                      "load_ok", "load_error"};

std::vector<double> StepBuckets() { return ExponentialBuckets(0.001, 2, 18); }

std::vector<double> TokenBuckets() { return ExponentialBuckets(1, 2, 17); }

// Returns the buckets of an expert's load: its rows, divided by the mean rows
// of all experts. The first bucket counts experts without rows.
std::vector<double> LoadBuckets() {
  return {0, 0.25, 0.5, 1, 1.5, 2, 4, 8, 16};
}

}  // namespace

EngineProbe::EngineProbe(prometheus::Registry* registry)
    : heartbeat_(AddGauge(registry, "weft_engine_heartbeat_timestamp_seconds",
                          "Unix time at which the engine thread last moved.")),
      train_tokens_(AddCounter(registry, "weft_train_tokens_total",
                               "Tokens of ForwardBackward and Forward.")),
      prompt_tokens_(
          AddCounter(registry, "weft_prompt_tokens_total",
                     "Tokens prefilled; what the prefix cache had is "
                     "not counted, a preempted sequence is again.")),
      sampled_tokens_(
          AddCounter(registry, "weft_sampled_tokens_total", "Tokens drawn.")),
      prefix_lookup_tokens_(AddCounter(
          registry, "weft_prefix_cache_lookup_tokens_total",
          "Tokens of prompts and of preempted sequences to be prefilled.")),
      prefix_hit_tokens_(
          AddCounter(registry, "weft_prefix_cache_hit_tokens_total",
                     "Those of them that the prefix cache had.")),
      preemptions_(AddCounter(
          registry, "weft_sample_preemptions_total",
          "Sequences that gave their key/value pages to older ones.")),
      batch_tokens_(registry, "weft_batch_tokens",
                    "Tokens of a device batch, by kind.", TokenBuckets(),
                    "kind", kBatches),
      step_seconds_(registry, "weft_step_seconds",
                    "Duration of a device batch, by phase.", StepBuckets(),
                    "phase", kPhases),
      decode_iterations_(registry, "weft_decode_iterations_total",
                         "Decode iterations, by the way they ran.", "way",
                         {"graph", "launches"}),
      decode_graphs_(AddGauge(registry, "weft_decode_graphs",
                              "CUDA graphs of decode iterations.")),
      decode_graph_bytes_(AddGauge(registry, "weft_decode_graph_bytes",
                                   "Device memory that recording them took.")),
      first_token_(AddHistogram(registry, "weft_time_to_first_token_seconds",
                                "Time from acceptance to the first token.",
                                StepBuckets())),
      kv_used_(AddGauge(registry, "weft_kv_cache_used_bytes",
                        "Bytes of key/value pages that sequences use.")),
      prefix_bytes_(AddGauge(registry, "weft_prefix_cache_bytes",
                             "Bytes of key/value pages of remembered prefixes, "
                             "in use or not.")),
      kv_capacity_(AddGauge(registry, "weft_kv_cache_capacity_bytes",
                            "Bytes of all key/value pages.")),
      states_used_(AddGauge(registry, "weft_state_cache_used_bytes",
                            "Bytes of recurrent states that sequences use; 0 "
                            "if the model has none.")),
      state_capacity_(AddGauge(registry, "weft_state_cache_capacity_bytes",
                               "Bytes of all recurrent states.")),
      device_total_(AddGauge(registry, "weft_device_memory_bytes",
                             "Memory of the device; 0 on the CPU.")),
      device_reserved_(AddGauge(registry, "weft_device_reserved_bytes",
                                "What this process has taken of it.")),
      device_allocated_(AddGauge(registry, "weft_device_allocated_bytes",
                                 "What is in use of that.")),
      optim_steps_(AddCounter(registry, "weft_optim_steps_total",
                              "OptimSteps applied.")),
      grad_norm_(AddHistogram(registry, "weft_grad_norm",
                              "Gradient norm before clipping.",
                              ExponentialBuckets(1e-4, 4, 16))),
      nonfinite_(AddCounter(registry, "weft_nonfinite_total",
                            "OptimSteps refused for a non-finite gradient.")),
      clipped_(AddCounter(registry, "weft_grad_clipped_total",
                          "OptimSteps whose gradient was clipped.")),
      out_of_memory_(
          AddCounter(registry, "weft_out_of_memory_total",
                     "Micro-batches for which there was no memory.")),
      expert_load_(AddHistogram(
          registry, "weft_expert_load_ratio",
          "Rows of an expert in a micro-batch over the mean of its layer's "
          "experts; one observation for each expert of each layer.",
          LoadBuckets())),
      expert_imbalance_(
          AddGauge(registry, "weft_expert_imbalance",
                   "Largest such ratio in the last micro-batch; 1 is even.")),
      checkpoints_(registry, "weft_checkpoints_total",
                   "Checkpoints written or read, by operation and outcome.",
                   "outcome", kCheckpointOutcomes),
      checkpoint_seconds_(registry, "weft_checkpoint_seconds",
                          "Duration of writing or reading a checkpoint.",
                          StepBuckets(), "op", {"save", "load"}),
      last_checkpoint_(
          AddGauge(registry, "weft_checkpoint_last_success_timestamp_seconds",
                   "Unix time of the last checkpoint written; 0: none.")),
      stored_checkpoints_(AddGauge(registry, "weft_checkpoint_store_bytes",
                                   "Bytes of all checkpoints.")) {}

void EngineProbe::Heartbeat() {
  last_heartbeat_ns_.store(absl::ToUnixNanos(SteadyNow()));
  heartbeat_.Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
}

void EngineProbe::ObserveTrain(bool backward, int64_t num_tokens,
                               absl::Duration elapsed) {
  train_tokens_.Increment(static_cast<double>(num_tokens));
  batch_tokens_[kTrainBatch].Observe(static_cast<double>(num_tokens));
  step_seconds_[backward ? kTrain : kForward].Observe(
      absl::ToDoubleSeconds(elapsed));
}

void EngineProbe::ObserveExperts(absl::Span<const int64_t> rows,
                                 size_t num_experts) {
  // Every token uses the same number of experts in each layer. So the mean of
  // the first layer is the mean of every layer.
  const double mean =
      static_cast<double>(std::accumulate(
          rows.begin(), rows.begin() + num_experts, int64_t{0})) /
      static_cast<double>(num_experts);
  for (const int64_t count : rows) {
    expert_load_.Observe(static_cast<double>(count) / mean);
  }
  expert_imbalance_.Set(static_cast<double>(*std::ranges::max_element(rows)) /
                        mean);
}

void EngineProbe::ObserveOptim(bool fits, double grad_norm,
                               double max_grad_norm, absl::Duration elapsed) {
  step_seconds_[kOptim].Observe(absl::ToDoubleSeconds(elapsed));
  if (!fits) {
    nonfinite_.Increment();
    return;
  }
  optim_steps_.Increment();
  grad_norm_.Observe(grad_norm);
  if (max_grad_norm > 0 && grad_norm > max_grad_norm) clipped_.Increment();
}

void EngineProbe::CountOutOfMemory() { out_of_memory_.Increment(); }

void EngineProbe::ObservePrefill(int64_t num_tokens, absl::Duration elapsed) {
  prompt_tokens_.Increment(static_cast<double>(num_tokens));
  batch_tokens_[kPrefillBatch].Observe(static_cast<double>(num_tokens));
  step_seconds_[kPrefill].Observe(absl::ToDoubleSeconds(elapsed));
}

void EngineProbe::ObserveDecode(int64_t num_tokens, bool by_graph,
                                absl::Duration elapsed) {
  decode_iterations_[by_graph ? 0 : 1].Increment();
  batch_tokens_[kDecodeBatch].Observe(static_cast<double>(num_tokens));
  step_seconds_[kDecode].Observe(absl::ToDoubleSeconds(elapsed));
}

void EngineProbe::SetDecodeGraphs(int64_t graphs, int64_t bytes) {
  decode_graphs_.Set(static_cast<double>(graphs));
  decode_graph_bytes_.Set(static_cast<double>(bytes));
}

void EngineProbe::ObserveFirstToken(absl::Duration since_accepted) {
  first_token_.Observe(absl::ToDoubleSeconds(since_accepted));
}

void EngineProbe::CountSampledToken() { sampled_tokens_.Increment(); }

void EngineProbe::CountPrefixLookup(int64_t num_tokens, int64_t num_found) {
  prefix_lookup_tokens_.Increment(static_cast<double>(num_tokens));
  prefix_hit_tokens_.Increment(static_cast<double>(num_found));
}

void EngineProbe::CountPreemption() { preemptions_.Increment(); }

void EngineProbe::SetKvBytes(int64_t used, int64_t prefixes, int64_t capacity) {
  prefix_bytes_.Set(static_cast<double>(prefixes));
  kv_used_.Set(static_cast<double>(used));
  kv_capacity_.Set(static_cast<double>(capacity));
}

void EngineProbe::SetStateBytes(int64_t used, int64_t capacity) {
  states_used_.Set(static_cast<double>(used));
  state_capacity_.Set(static_cast<double>(capacity));
}

void EngineProbe::SetDeviceMemory(int64_t total, int64_t reserved,
                                  int64_t allocated) {
  device_total_.Set(static_cast<double>(total));
  device_reserved_.Set(static_cast<double>(reserved));
  device_allocated_.Set(static_cast<double>(allocated));
}

void EngineProbe::ObserveCheckpoint(std::string_view op, bool ok,
                                    absl::Duration elapsed) {
  const size_t is_load = op == "load" ? 1 : 0;
  checkpoints_[2 * is_load + (ok ? 0 : 1)].Increment();
  checkpoint_seconds_[is_load].Observe(absl::ToDoubleSeconds(elapsed));
  if (ok && is_load == 0) last_checkpoint_.SetToCurrentTime();
}

void EngineProbe::SetStoredCheckpoints(uint64_t bytes) {
  stored_checkpoints_.Set(static_cast<double>(bytes));
}

}  // namespace weft::engine
