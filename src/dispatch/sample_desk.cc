#include "src/dispatch/sample_desk.h"

#include <memory>
#include <utility>

#include "src/base/status_macros.h"

namespace weft::dispatch {
namespace {

int64_t DrawnTokens(const SampleResult& result) {
  int64_t tokens = 0;
  for (const Sample& sample : result.samples) {
    tokens += static_cast<int64_t>(sample.tokens.size());
  }
  return tokens;
}

}  // namespace

CancelHandle SampleDesk::Submit(SampleRequest request,
                                std::function<void(SampleDelta)> on_delta,
                                Callback<SampleResult> done) {
  return SubmitAs(std::nullopt, /*before_drain=*/false, std::move(request),
                  std::move(on_delta), done);
}

CancelHandle SampleDesk::SubmitTo(AdapterKey key, bool before_drain,
                                  SampleRequest request,
                                  std::function<void(SampleDelta)> on_delta,
                                  Callback<SampleResult> done) {
  return SubmitAs(key, before_drain, std::move(request), std::move(on_delta),
                  done);
}

CancelHandle SampleDesk::SubmitAs(std::optional<AdapterKey> key,
                                  bool before_drain, SampleRequest request,
                                  std::function<void(SampleDelta)> on_delta,
                                  const Callback<SampleResult>& done) {
  const absl::StatusOr<uint64_t> id =
      Accept(key, before_drain, request, std::move(on_delta), done);
  if (!id.ok()) {
    done(id.status());
    return {};
  }
  s_.changed.NotifyAll();
  return CancelHandle([this, id = *id] { Cancel(id); });
}

absl::StatusOr<uint64_t> SampleDesk::Accept(
    std::optional<AdapterKey> key, bool before_drain, SampleRequest& request,
    std::function<void(SampleDelta)> on_delta,
    const Callback<SampleResult>& done) {
  MutexLock lock(&s_.mu);
  if (!key) {
    WEFT_RETURN_IF_ERROR(s_.CheckReady(request.adapter_id));
    key = s_.KeyOf(request.adapter_id);
  }
  if (!key) return NoSuchAdapter(request.adapter_id);
  if (!before_drain || s_.stopping) WEFT_RETURN_IF_ERROR(s_.CheckOpen());
  const uint64_t id = s_.next_id++;
  const AdapterKey own = s_.SchedulersKey(*key, request.tenant);
  WEFT_RETURN_IF_ERROR(s_.scheduler
                           .Enqueue({.id = id,
                                     .kind = WorkKind::kSample,
                                     .adapter = own,
                                     .tokens = request.num_tokens(),
                                     .deadline = request.deadline},
                                    s_.env.clock->Now())
                           .status());
  s_.WantAdapter(*key);
  auto work = std::make_unique<SampleWork>();
  work->request = std::move(request);
  work->adapter = *key;
  work->flow = own;
  work->tenant = s_.scheduler.TenantOf(own);
  work->accepted_at = s_.env.clock->Now();
  work->on_delta = std::move(on_delta);
  work->done = done;
  s_.samples.emplace(id, std::move(work));
  return id;
}

void SampleDesk::Cancel(uint64_t id) {
  {
    MutexLock lock(&s_.mu);
    if (!s_.samples.contains(id)) return;
    if (!s_.Withdraw(id, absl::CancelledError("cancelled by the client"))) {
      // The engine thread has taken the sample and may still put it back, so
      // only that thread can tell whether the sample runs.
      s_.cancelled_samples.push_back(id);
    }
  }
  s_.changed.NotifyAll();
}

std::optional<SampleTask> SampleDesk::Take(
    const std::set<std::string>& without) {
  MutexLock lock(&s_.mu);
  const std::vector<uint64_t> taken =
      s_.scheduler.TakeSamples(s_.env.clock->Now(), 1, without);
  if (taken.empty()) return std::nullopt;
  const SampleWork& work = *s_.samples.at(taken.front());
  return SampleTask{.id = taken.front(),
                    .adapter = work.adapter,
                    .flow = work.flow,
                    .tenant = work.tenant,
                    .request = &work.request,
                    .accepted_at = work.accepted_at,
                    .streams = work.on_delta != nullptr};
}

void SampleDesk::PutBack(const SampleTask& sample) {
  MutexLock lock(&s_.mu);
  s_.scheduler.PutBack(sample.id);
}

void SampleDesk::Start(const SampleTask& sample) {
  MutexLock lock(&s_.mu);
  s_.env.metrics->ObserveWait(WorkKind::kSample,
                              s_.env.clock->Now() - sample.accepted_at);
  s_.residency.Used(sample.adapter, kSampling);
}

void SampleDesk::Finish(uint64_t id, absl::StatusOr<SampleResult> result) {
  decltype(s_.samples)::node_type node;  // Destroyed after the lock's release.
  MutexLock lock(&s_.mu);
  node = s_.samples.extract(id);
  if (node.empty()) return;
  SampleWork& work = *node.mapped();
  if (result.ok()) {
    const auto prompt = static_cast<int64_t>(work.request.prompt.size());
    const int64_t drawn = DrawnTokens(*result);
    s_.env.metrics->CountTenantSample(work.tenant, prompt + drawn);
    if (AdapterRecord* record = s_.Find(work.adapter)) {
      record->history.CountSampled(drawn);
    }
  }
  s_.env.post_reply(
      [done = std::move(work.done), result = std::move(result)]() mutable {
        done(std::move(result));
      });
}

void SampleDesk::Deliver(uint64_t id, std::vector<SampleDelta> deltas) {
  if (deltas.empty()) return;
  MutexLock lock(&s_.mu);
  const auto it = s_.samples.find(id);
  if (it == s_.samples.end()) return;
  s_.env.post_reply(
      [on_delta = it->second->on_delta, deltas = std::move(deltas)]() mutable {
        for (SampleDelta& delta : deltas) on_delta(std::move(delta));
      });
}

}  // namespace weft::dispatch
