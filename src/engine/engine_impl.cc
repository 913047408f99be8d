#include "src/engine/engine_impl.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/engine/head_options.h"
#include "src/engine/torch_guard.h"

namespace weft::engine {
namespace {

sched::SchedulerOptions SchedulerOptionsOf(const EngineOptions& options) {
  return {
      .max_batch_tokens = options.max_batch_tokens,
      .queue = {.max_requests = options.max_queue_requests,
                .max_tokens = options.max_queue_tokens,
                .max_requests_per_tenant =
                    options.max_queue_requests_per_tenant,
                .max_tokens_per_tenant = options.max_queue_tokens_per_tenant},
      .sampling_share = options.sampling_share,
      .tenant_weights = *ParseTenantWeights(options.tenant_weights)};
}

// Those that metrics tell apart.
std::vector<std::string> NamedTenants(const EngineOptions& options) {
  const auto weights = ParseTenantWeights(options.tenant_weights);
  std::vector<std::string> names;
  for (const auto& [name, weight] : *weights) names.push_back(name);
  return names;
}

}  // namespace

EngineImpl::EngineImpl(EngineParts parts, prometheus::Registry* registry)
    : parts_(std::move(parts)),
      probe_(registry, NamedTenants(parts_.options)),
      group_(*parts_.decoder, HeadOptionsOf(parts_.options, *parts_.decoder),
             std::move(parts_.links)),
      adapters_(parts_.decoder->config().shape(), parts_.decoder->dtype(),
                parts_.decoder->device(), parts_.options.max_adapters,
                parts_.options.max_adapters_per_tenant),
      adapter_io_(parts_.options.checkpoint_dir, parts_.model_name,
                  parts_.decoder->config().shape()),
      train_runner_(
          &group_, {.share_prompts = parts_.options.share_prompts,
                    .checkpointing = parts_.options.gradient_checkpointing,
                    .memory_budget_bytes = parts_.options.memory_budget_bytes}),
      sample_loop_(&group_,
                   {.kv_cache_bytes = parts_.options.kv_cache_bytes,
                    .max_decode_sequences = parts_.options.max_decode_sequences,
                    .max_prefill_tokens = parts_.options.max_batch_tokens,
                    .decode_graphs = parts_.options.decode_graphs},
                   parts_.token_bytes.get(), &probe_),
      scheduler_(SchedulerOptionsOf(parts_.options)),
      residency_({.max_resident = parts_.options.max_resident_adapters,
                  .host_bytes = static_cast<uint64_t>(
                      parts_.options.adapter_host_bytes)}) {
  if (parts_.memory.has_value()) probe_.SetMemorySplit(*parts_.memory);
  adapter_io_.RemoveStaleFiles();
  thread_ = std::thread([this] { Loop(); });
}

EngineImpl::~EngineImpl() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  changed_.NotifyAll();
  thread_.join();
  // A rank that is gone already was logged.
  RunGuarded("stopping the other ranks", [this] {
    group_.Stop();
  }).IgnoreError();
  // Nothing runs any more: whoever still waits is told.
  const absl::Status stopped =
      absl::UnavailableError("the server stopped before the request ran");
  for (const auto& [ticket, task] : slot_tasks_) task(stopped);
  for (const auto& [adapter, tasks] : adapter_tasks_) {
    for (const RoomTask& task : tasks) task(stopped);
  }
  MutexLock lock(&mu_);
  while (!steps_.empty()) DropStep(steps_.begin()->first, stopped);
  while (!samples_.empty()) DropSample(samples_.begin()->first, stopped);
  for (Callback<bool>& done : std::exchange(drain_waiters_, {})) {
    completions_.Post([done = std::move(done), stopped] { done(stopped); });
  }
}

}  // namespace weft::engine
