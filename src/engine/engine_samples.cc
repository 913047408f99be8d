// Samples: from the queue to the decode loop, and from it to who waits.
#include <utility>

#include "absl/time/clock.h"
#include "src/engine/engine_impl.h"

namespace weft::engine {

void EngineImpl::AdmitSamples() {
  MutexLock lock(&mu_);
  for (;;) {
    const std::vector<uint64_t> taken = scheduler_.TakeSamples(absl::Now(), 1);
    if (taken.empty()) return;
    const uint64_t id = taken.front();
    const SampleWork& work = *samples_.at(id);
    if (!sample_loop_.HasRoom(work.request)) {
      scheduler_.PutBack(id);
      return;
    }
    lora::AdapterVersionPtr version;
    if (!work.request.adapter_id.empty()) {
      absl::StatusOr<lora::AdapterVersionPtr> found =
          adapters_.Version(work.request.adapter_id, work.request.snapshot);
      if (!found.ok()) {
        DropSample(id, found.status());
        continue;
      }
      version = *std::move(found);
    }
    probe_.ObserveWait(sched::WorkKind::kSample, work.accepted_at);
    sample_loop_.Admit(id, &work.request, work.on_delta != nullptr,
                       work.accepted_at, std::move(version));
    residency_.Used(work.request.adapter_id, sched::kSampling);
  }
}

void EngineImpl::RunDecode() {
  AdmitSamples();
  std::vector<SampleEvent> events;
  const absl::Status status =
      Compute("Sample", [&] { events = sample_loop_.Step(); });
  MutexLock lock(&mu_);
  if (!status.ok()) {
    for (const uint64_t id : sample_loop_.CancelAll()) DropSample(id, status);
    return;
  }
  for (SampleEvent& event : events) {
    const auto it = samples_.find(event.work_id);
    if (!event.deltas.empty()) {
      completions_.Post([on_delta = it->second->on_delta,
                         deltas = std::move(event.deltas)]() mutable {
        for (SampleDelta& delta : deltas) on_delta(std::move(delta));
      });
    }
    if (event.finished) {
      if (event.result.ok()) CountTenantTokens(*it->second, *event.result);
      completions_.Post([done = std::move(it->second->done),
                         result = std::move(event.result)]() mutable {
        done(std::move(result));
      });
      samples_.erase(it);
    }
  }
}

void EngineImpl::CountTenantTokens(const SampleWork& work,
                                   const SampleResult& result) {
  auto num_tokens = static_cast<int64_t>(work.request.prompt.size());
  for (const weft::Sample& sample : result.samples) {
    num_tokens += static_cast<int64_t>(sample.tokens.size());
  }
  probe_.CountTenantSample(work.tenant, num_tokens);
}

}  // namespace weft::engine
