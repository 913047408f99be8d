#include "src/engine/device/engine_probe.h"

#include <algorithm>
#include <numeric>

#include "absl/time/clock.h"
#include "src/base/clock.h"

namespace weft::engine {

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
