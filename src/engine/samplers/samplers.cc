#include "src/engine/samplers/samplers.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/reason.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_io.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/adapters/state_image.h"

namespace weft::engine {
namespace {

// So long after a look no other one is needed. Only another process can have
// changed the checkpoint meanwhile.
constexpr absl::Duration kFresh = absl::Seconds(1);

// Returns the error of a load as that of the sample's field.
absl::Status OfField(absl::string_view field, const absl::Status& status) {
  absl::string_view text = absl::StripPrefix(status.message(), "name: ");
  const bool has_name = absl::ConsumePrefix(&text, "checkpoint '");
  absl::Status named(status.code(),
                     absl::StrCat(field, has_name ? " '" : ": ", text));
  status.ForEachPayload(
      [&named](absl::string_view url, const absl::Cord& data) {
        named.SetPayload(url, data);
      });
  return named;
}

absl::Status NoRoom(int max, const std::string& tenant) {
  return WithReason(
      absl::ResourceExhaustedError(absl::StrCat(
          "samples use all ", max,
          " checkpoints that are kept for sampling (--sampler-cache-adapters)"
          "; try again")),
      {.name = "SAMPLER_CACHE_FULL",
       .values = {{"limit", absl::StrCat(max)}, {"tenant", tenant}}});
}

// Returns whether a checkpoint of this time is wanted. Callers keep times in
// nanoseconds.
bool Fits(absl::Time wanted, absl::Time created_at) {
  return wanted == absl::InfinitePast() ||
         absl::ToUnixNanos(wanted) == absl::ToUnixNanos(created_at);
}

absl::Status Overwritten(absl::Time at) {
  return absl::FailedPreconditionError(absl::StrCat(
      "the checkpoint was overwritten at ",
      absl::FormatTime(at, absl::UTCTimeZone()),
      ", and its old weights are gone: make a new sampling session to sample "
      "from the new ones"));
}

}  // namespace

Samplers::Samplers(const EngineContext* context, AdapterManager* manager,
                   prometheus::Registry* registry)
    : context_(*context),
      manager_(*manager),
      hits_(AddCounter(registry, "weft_sampler_cache_hits_total",
                       "Samples from a checkpoint that was kept.")),
      loads_(AddCounter(registry, "weft_sampler_cache_loads_total",
                        "Checkpoints that were brought in for samples.")),
      kept_(AddGauge(registry, "weft_sampler_cache_checkpoints",
                     "Checkpoints that are kept for samples.")),
      table_(context->options.sampler_cache_adapters) {}

CancelHandle Samplers::Sample(SampleRequest request,
                              std::function<void(SampleDelta)> on_delta,
                              Callback<SampleResult> done) {
  if (const absl::Status open = context_.dispatcher.CheckOpen(); !open.ok()) {
    done(open);
    return {};
  }
  const Wanted wanted = {{request.adapter_id, request.checkpoint},
                         request.checkpoint_created_at};
  std::optional<AdapterKey> key;
  {
    MutexLock lock(&mu_);
    key = UseSeen(wanted);
  }
  if (key) {
    hits_.Increment();
    return Submit(*key, /*before_drain=*/false, std::move(request),
                  std::move(on_delta), std::move(done));
  }
  const auto waiter = std::make_shared<Waiter>();
  waiter->request = std::move(request);
  waiter->on_delta = std::move(on_delta);
  waiter->done = std::move(done);
  waiter->hold = context_.dispatcher.Hold();
  WaitForLook(wanted, {waiter});
  return CancelHandle([this, waiter] { Cancel(waiter); });
}

std::optional<AdapterKey> Samplers::UseSeen(const Wanted& wanted) {
  const std::optional<AdapterKey> key = Kept(wanted);
  if (!key) return std::nullopt;
  const Sampler& sampler = table_.At(*key);
  const bool is_fresh = sampler.seen.changes == context_.files.changes() &&
                        SteadyNow() - sampler.seen.at <= kFresh;
  const bool is_away = context_.state != nullptr && !context_.state->answers();
  if (!is_fresh && !is_away) return std::nullopt;
  table_.Begin(*key);
  return key;
}

std::optional<AdapterKey> Samplers::Kept(const Wanted& wanted) {
  const std::optional<AdapterKey> key = table_.Find(wanted.first);
  if (!key) return std::nullopt;
  const Sampler& sampler = table_.At(*key);
  const bool is_it = Fits(wanted.second, sampler.created_at) &&
                     sampler.expires_at > absl::Now();
  return is_it ? key : std::nullopt;
}

void Samplers::WaitForLook(const Wanted& wanted, const Waiters& waiters) {
  bool is_first = false;
  {
    MutexLock lock(&mu_);
    const auto [look, is_new] = looks_.try_emplace(wanted);
    look->second.insert(look->second.end(), waiters.begin(), waiters.end());
    is_first = is_new;
  }
  if (!is_first) return;
  context_.PostIo(wanted.first.first, [this, wanted] { Look(wanted); });
}

void Samplers::Look(const Wanted& wanted) {
  const SamplerName& name = wanted.first;
  Waiters waiters;
  {
    MutexLock lock(&mu_);
    waiters = std::move(looks_.extract(wanted).mapped());
    looking_ = {wanted, waiters};
  }
  const Sighting seen = {.at = SteadyNow(),
                         .changes = context_.files.changes()};
  const absl::StatusOr<CheckpointInfo> info =
      manager_.DescribeLoad({.source_adapter_id = name.first,
                             .name = name.second,
                             .weights_only = true});
  {
    MutexLock lock(&mu_);
    looking_ = {};
  }
  context_.dispatcher.Post(
      [this, wanted, seen, waiters, info](const absl::Status& open) {
        open.ok() ? Settle(wanted, seen, info, waiters) : Fail(waiters, open);
      });
}

void Samplers::GoOn() {
  std::vector<std::pair<AdapterKey, Waiters>> ready;
  {
    MutexLock lock(&mu_);
    const bool waits = !looks_.empty() || !looking_.second.empty();
    if (!waits || context_.state == nullptr || context_.state->answers()) {
      return;
    }
    const auto add = [&](const Wanted& wanted, Waiters& waiters)
                         ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
                           const auto key = Kept(wanted);
                           if (!key) return;
                           ready.emplace_back(*key, std::exchange(waiters, {}));
                         };
    for (auto& [wanted, waiters] : looks_) add(wanted, waiters);
    add(looking_.first, looking_.second);
  }
  for (const auto& [key, waiters] : ready) SubmitAll(key, waiters);
}

void Samplers::Settle(const Wanted& wanted, const Sighting& seen,
                      const absl::StatusOr<CheckpointInfo>& info,
                      const Waiters& waiters) {
  const SamplerName& name = wanted.first;
  if (IsStoreAway(context_, info.status())) {
    return WaitForStore(wanted, waiters);
  }
  if (!info.ok()) {
    if (absl::IsNotFound(info.status())) Retire(name, absl::InfinitePast());
    return Refuse(waiters, info.status());
  }
  if (!Fits(wanted.second, info->created_at)) {
    return Refuse(waiters, Overwritten(info->created_at));
  }
  bool made = false;
  const absl::StatusOr<AdapterKey> key = Keep(name, seen, *info, &made);
  if (!key.ok()) return Refuse(waiters, key.status());
  SubmitAll(*key, waiters, made);
}

void Samplers::WaitForStore(const Wanted& wanted, const Waiters& waiters) {
  std::optional<AdapterKey> key;
  {
    MutexLock lock(&mu_);
    key = Kept(wanted);
  }
  if (key) {
    return SubmitAll(*key, waiters);
  }
  context_.when_store_answers(
      [this, wanted, waiters](const absl::Status& open) {
        open.ok() ? WaitForLook(wanted, waiters) : Fail(waiters, open);
      });
}

void Samplers::SubmitAll(AdapterKey key, const Waiters& waiters, bool made) {
  for (const WaiterPtr& waiter : waiters) {
    {
      MutexLock lock(&mu_);
      if (std::exchange(waiter->ended, true)) continue;
      table_.Begin(key);
    }
    if (!made) hits_.Increment();
    const CancelHandle running =
        Submit(key, /*before_drain=*/true, std::move(waiter->request),
               std::move(waiter->on_delta), std::move(waiter->done));
    waiter->hold.reset();
    bool cancelled = false;
    {
      MutexLock lock(&mu_);
      waiter->running = running;
      cancelled = waiter->cancelled;
    }
    if (cancelled) running.Cancel();
  }
}

CancelHandle Samplers::Submit(AdapterKey key, bool before_drain,
                              SampleRequest request,
                              std::function<void(SampleDelta)> on_delta,
                              Callback<SampleResult> done) {
  return context_.dispatcher.samples().SubmitTo(
      key, before_drain, std::move(request), std::move(on_delta),
      [this, key, done = std::move(done)](absl::StatusOr<SampleResult> result) {
        EndUse(key);
        done(std::move(result));
      });
}

void Samplers::EndUse(AdapterKey key) {
  {
    MutexLock lock(&mu_);
    if (!table_.End(key)) return;
    Show();
  }
  context_.dispatcher.Post([this, key](const absl::Status& open) {
    if (open.ok()) manager_.Remove(key);
  });
}

void Samplers::Cancel(const WaiterPtr& waiter) {
  CancelHandle running;
  bool waits = false;
  {
    MutexLock lock(&mu_);
    waiter->cancelled = true;
    waits = !std::exchange(waiter->ended, true);
    running = waiter->running;
  }
  if (!waits) return running.Cancel();
  context_.Reply(waiter->done, absl::CancelledError("cancelled by the client"));
  waiter->request = {};
  waiter->hold.reset();
}

void Samplers::Fail(const Waiters& waiters, const absl::Status& status) {
  for (const WaiterPtr& waiter : waiters) {
    {
      MutexLock lock(&mu_);
      if (std::exchange(waiter->ended, true)) continue;
    }
    context_.Reply(waiter->done, status);
    waiter->hold.reset();
  }
}

void Samplers::Refuse(const Waiters& waiters, const absl::Status& status) {
  for (const WaiterPtr& waiter : waiters) {
    Fail({waiter}, OfField(waiter->field, status));
  }
}

absl::StatusOr<AdapterKey> Samplers::Keep(const SamplerName& name,
                                          const Sighting& seen,
                                          const CheckpointInfo& info,
                                          bool* made) {
  Retire(name, info.created_at);
  {
    MutexLock lock(&mu_);
    if (const std::optional<AdapterKey> key = table_.Find(name)) {
      Sampler& sampler = table_.At(*key);
      sampler.expires_at = info.expires_at;
      sampler.seen = seen;
      return *key;
    }
  }
  // Old checkpoints do not say whose they are.
  const std::string tenant =
      info.tenant.empty() ? OwnerOf(name.first) : info.tenant;
  WEFT_RETURN_IF_ERROR(MakeRoom(tenant));
  *made = true;
  return Make(name, tenant, seen, info);
}

absl::Status Samplers::MakeRoom(const std::string& tenant) {
  std::optional<AdapterKey> victim;
  {
    MutexLock lock(&mu_);
    if (!table_.full()) return absl::OkStatus();
    victim = table_.Evict(tenant);
  }
  if (!victim) {
    return NoRoom(context_.options.sampler_cache_adapters, tenant);
  }
  manager_.Remove(*victim);
  return absl::OkStatus();
}

AdapterKey Samplers::Make(const SamplerName& name, const std::string& tenant,
                          const Sighting& seen, const CheckpointInfo& info) {
  dispatch::AdapterDesk& desk = context_.dispatcher.adapters();
  const AdapterKey key = desk.NewKey();
  context_.adapters.AddOnDisk(
      key, info.config,
      {.optim_steps = info.optim_steps,
       .optimizer = info.optimizer,
       .versions = {{.number = info.optim_steps + 1}}},
      /*snapshots=*/{},
      {.name = name.second,
       .durable = true,
       .checkpoint = CheckpointSource{.adapter_id = name.first,
                                      .name = name.second,
                                      .created_at = info.created_at}},
      info.created_at);
  const dispatch::AdapterFacts facts = context_.adapters.Facts(key);
  desk.AddSampler(key, absl::StrCat(name.first, "@", name.second), tenant,
                  facts);
  loads_.Increment();
  MutexLock lock(&mu_);
  table_.Add(key, tenant, static_cast<int64_t>(facts.image_bytes),
             {.name = name,
              .created_at = info.created_at,
              .expires_at = info.expires_at,
              .seen = seen});
  Show();
  return key;
}

void Samplers::Retire(const SamplerName& name, absl::Time except) {
  std::optional<AdapterKey> key;
  {
    MutexLock lock(&mu_);
    key = table_.Find(name);
    if (!key || table_.At(*key).created_at == except) return;
    if (!table_.Retire(*key)) return;
    Show();
  }
  manager_.Remove(*key);
}

void Samplers::Show() { kept_.Set(static_cast<double>(table_.size())); }

}  // namespace weft::engine
