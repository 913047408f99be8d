#include "src/engine/engine_impl.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/DeviceGuard.h>
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/observe/profile.h"
#include "src/base/status_macros.h"
#include "src/base/threads/periodic_task.h"
#include "src/engine/decode/head_options.h"
#include "src/engine/device/compute_guard.h"
#include "src/engine/device/host_allocator.h"
#include "src/engine/train/activation_budget.h"
#include "src/ops/matmul.h"

namespace weft::engine {
namespace {

// The engine thread waits at most this long for work. So its heartbeat stays
// recent.
constexpr absl::Duration kIdleWait = absl::Milliseconds(200);
// As long as a snapshot runs, whose parts are on the engine thread, too.
constexpr absl::Duration kSnapshotWait = absl::Milliseconds(1);

// After this time without work the engine frees memory that it keeps for later
// work.
constexpr absl::Duration kIdleRelease = absl::Seconds(10);

// The I/O thread looks at the disks at most once in this time.
constexpr absl::Duration kDiskInterval = absl::Seconds(1);

// At this interval the process gives back the host's memory that it has not
// used since the last time. A longer interval would keep the memory of a rare
// peak; a shorter one would map a training step's blocks anew for each step.
constexpr absl::Duration kReleaseInterval = absl::Minutes(1);

// The engine thread's name in `top -H`. The compute threads inherit the name.
constexpr const char* kThreadName = "weft-engine";

// Returns the bytes that adapters on the device may hold. On CUDA the slots
// are counted so that adapters fit; a CPU has no such count.
uint64_t AdapterBytes(bool on_cpu) {
  return on_cpu ? static_cast<uint64_t>(DefaultHostBudget().bytes) / 2 : 0;
}

dispatch::Options DispatchOptionsOf(const EngineOptions& options, bool on_cpu) {
  return {.scheduler = {.max_batch_tokens = options.max_batch_tokens,
                        .sampling_share = options.sampling_share,
                        .tenant_weights =
                            *ParseTenantWeights(options.tenant_weights)},
          .residency = {.max_resident = options.max_resident_adapters,
                        .host_bytes =
                            static_cast<uint64_t>(options.adapter_host_bytes),
                        .device_bytes = AdapterBytes(on_cpu)},
          .max_adapters = options.max_adapters,
          .max_adapters_per_tenant = options.max_adapters_per_tenant,
          .max_adapter_bytes_per_tenant =
              static_cast<uint64_t>(options.max_adapter_bytes_per_tenant),
          .max_stored_reply_bytes = options.max_stored_reply_bytes,
          .records_steps = options.keeps_state()};
}

// Returns the tenants that have metrics of their own.
std::vector<std::string> NamedTenants(const EngineOptions& options) {
  const auto weights = ParseTenantWeights(options.tenant_weights);
  std::vector<std::string> names;
  for (const auto& [name, weight] : *weights) names.push_back(name);
  return names;
}

// Returns the settings that can change the bits of results, as text.
std::string SettingsOf(const EngineOptions& options,
                       const model::Decoder& decoder) {
  return absl::StrCat("device=", decoder.device().str(),
                      " dtype=", c10::toString(decoder.dtype()),
                      " int8=", options.base_weights == BaseWeights::kInt8,
                      " instructions=", at::get_cpu_capability(),
                      " bf16_products=", ops::AreBf16ProductsAllowed(),
                      " threads=", at::get_num_threads(),
                      " tensor_parallel=", options.tensor_parallel_size,
                      " data_parallel=", options.data_parallel_size,
                      " expert_parallel=", options.expert_parallel_size,
                      " share_prompts=", options.share_prompts,
                      " loss_chunk=", options.loss_chunk_size);
}

// Returns the joined trace ids of the requests that share a micro-batch.
TraceId TraceOf(const dispatch::RunTrain& train) {
  std::vector<TraceId> ids;
  ids.reserve(train.slices.size());
  for (const auto& [slice, step] : train.slices) ids.push_back(step.trace);
  return JoinTraces(ids);
}

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

}  // namespace

// The lambdas use members that are constructed after the member that gets them.
// They run only on threads that have work, so after the constructor.
EngineImpl::EngineImpl(EngineParts parts, prometheus::Registry* registry)
    : parts_(std::move(parts)),
      probe_(registry),
      dispatch_metrics_(registry, NamedTenants(parts_.options)),
      sample_records_(parts_.options.sample_record_bytes,
                      parts_.base.fingerprint, &clock_, &recorder_, registry),
      executor_(*parts_.decoder, HeadOptionsOf(parts_.options, *parts_.decoder),
                std::move(parts_.links)),
      guard_(parts_.device.get(), &executor_),
      adapters_(parts_.decoder->config().shape(), parts_.decoder->dtype(),
                parts_.decoder->device()),
      adapter_io_(std::move(parts_.checkpoints), parts_.base),
      sample_loop_(
          &executor_,
          {.kv_cache_bytes = parts_.options.kv_cache_bytes,
           .max_decode_sequences = parts_.options.max_decode_sequences,
           .tenant_weights = *ParseTenantWeights(parts_.options.tenant_weights),
           .max_prefill_tokens = parts_.options.max_batch_tokens,
           .decode_graphs = parts_.options.decode_graphs,
           .adapt_threads = parts_.options.num_threads == 0 &&
                            parts_.decoder->device().is_cpu(),
           .latest =
               [this](AdapterKey key) {
                 const lora::Adapter* const adapter = adapters_.Find(key);
                 return adapter == nullptr ? nullptr : adapter->latest();
               }},
          parts_.token_bytes.get(), &probe_),
      dispatcher_(
          DispatchOptionsOf(parts_.options, parts_.decoder->device().is_cpu()),
          {.clock = &clock_,
           .post_reply =
               [this](std::function<void()> task) {
                 replies_.Post(std::move(task));
               },
           .post_durable =
               [this](std::function<void()> task) {
                 context_.PostReply(std::move(task));
               },
           .metrics = &dispatch_metrics_,
           .check_room = [this] { return recorder_.CheckRoom(); }}),
      store_wait_([this] { return parts_.state->answers(); }),
      context_{.options = parts_.options,
               .dispatcher = dispatcher_,
               .device = *parts_.device,
               .guard = guard_,
               .adapters = adapters_,
               .files = adapter_io_,
               .probe = probe_,
               .recorder = recorder_,
               .sample_records = sample_records_,
               .state = parts_.state.get(),
               .directory = parts_.directory.get(),
               .before_change =
                   [this](AdapterKey key) { snapshots_.BeforeChange(key); },
               .when_store_answers =
                   [this](dispatch::EngineTask task) {
                     store_wait_.Add(SteadyNow(), std::move(task));
                   },
               .io = io_,
               .replies = replies_},
      mover_(&context_, parts_.spill.get()),
      trainer_(&context_, &executor_, &mover_),
      step_executor_(&context_),
      sample_runner_(&context_, &sample_loop_),
      manager_(&context_, &mover_,
               [this](uint64_t step_id) {
                 trainer_.Forget(step_id);
                 step_executor_.Forget(step_id);
               }),
      samplers_(&context_, &manager_, registry),
      snapshots_(&context_, parts_.spill.get()),
      moves_(&context_, &manager_, &snapshots_, &sample_runner_, registry),
      recovery_(
          &context_, &manager_, &trainer_, &step_executor_, &snapshots_,
          SettingsOf(parts_.options, *parts_.decoder),
          [this](log::AcceptedRecord& step) { Resume(step); },
          [this](OpenMoves moves) { moves_.Resume(std::move(moves)); }) {
  if (parts_.state != nullptr) log_metrics_.emplace(registry);
  FillInfo();
  ShowMemory(parts_.memory.value_or(MemorySplit()), registry);
  adapter_io_.RemoveStaleFiles();
  thread_ = std::thread([this] { Loop(); });
}

void EngineImpl::FillInfo() {
  parts_.info.cached_tokens = sample_loop_.cached_tokens();
  if (parts_.directory == nullptr) return;
  parts_.info.log = parts_.directory->own();
  parts_.info.num_logs = parts_.directory->num_logs();
}

EngineImpl::~EngineImpl() { Stop(); }

void EngineImpl::Stop() {
  SetTakesSamples(false);
  dispatcher_.Stop();
  thread_.join();
  // Ignores the status: RunGuarded has already logged an error.
  RunGuarded("stopping the other ranks", [this] {
    executor_.Stop();
  }).IgnoreError();
  const absl::Status stopped =
      absl::UnavailableError("the server stopped before the request ran");
  dispatcher_.Close(stopped);
  store_wait_.Close(stopped);
  // An I/O task's answer waits for the log, which passes it to the reply
  // thread when it is on disk.
  io_.Stop();
  if (parts_.directory != nullptr) parts_.directory->memory().Stop();
  if (parts_.members != nullptr) parts_.members->Stop();
  recorder_.Stop();
  replies_.Stop();
  // Nothing writes any more. So another process may go on at once, also after
  // an error of this one.
  if (parts_.state == nullptr || !parts_.state->failure().ok()) return;
  // Something may have come before the drain, and was made after it.
  const bool drained = moves_.drained() && num_adapters() == 0 &&
                       recorder_.UnitWithNotes().empty();
  if (const absl::Status released = parts_.state->Release(drained);
      !released.ok()) {
    Log(LogLevel::kWarning, "the state could not be given back",
        {{"reason", released.message()}});
  }
}

absl::Status EngineImpl::Recover() {
  if (parts_.state == nullptr) return absl::OkStatus();
  WEFT_RETURN_IF_ERROR(recovery_.Start(&*log_metrics_));
  SetTakesSamples(true);
  return absl::OkStatus();
}

void EngineImpl::Loop() {
  pthread_setname_np(pthread_self(), kThreadName);
  // Gradients are computed by hand, so autograd is off.
  const at::InferenceMode no_autograd;
  // Weft's own kernels run on this thread's current device.
  const c10::DeviceGuard on_device(parts_.decoder->device());
  MeterDeviceMemory();
  absl::Time idle_since = SteadyNow();
  PeriodicTask disk_look(kDiskInterval, [this] {
    // Until then the I/O thread has adapters to read in.
    if (parts_.state == nullptr || recovery_.succeeded()) {
      adapter_io_.DeleteExpired();
      adapter_io_.Sweep();
    }
    probe_.SetStoredCheckpoints(adapter_io_.stored_bytes());
    parts_.disks->Refresh();
  });
  PeriodicTask release(kReleaseInterval, [this] {
    HostAllocator::Get().ReleaseUnused();
    sample_records_.DropExpired();
  });
  const auto post_io = [this](std::function<void()> task) {
    context_.PostIo("", std::move(task));
  };
  while (std::optional<dispatch::Work> work = NextWork()) {
    const absl::Time start = SteadyNow();
    Run(*work);
    if (!std::holds_alternative<dispatch::Idle>(*work)) {
      idle_since = SteadyNow();
    } else if (start - idle_since > kIdleRelease) {
      parts_.device->ReleaseIdle();
    }
    const bool trained = std::holds_alternative<dispatch::RunTrain>(*work) ||
                         std::holds_alternative<dispatch::RunStep>(*work);
    if (trained) recorder_.AddCost(SteadyNow() - start);
    // Until recovery has succeeded, a snapshot would lack unreplayed steps.
    if (recovery_.succeeded()) {
      snapshots_.GoOn();
      moves_.GoOn(start);
    }
    mover_.GoOn();
    samplers_.GoOn();
    store_wait_.GoOn(start);
    disk_look.PostWhenDue(start, post_io);
    release.PostWhenDue(start, post_io);
    probe_.Heartbeat();
    profile_.BetweenWork(
        trained || std::holds_alternative<dispatch::RunDecode>(*work),
        SteadyNow());
  }
  if (recovery_.succeeded() && failure().ok() && dispatcher_.drained()) {
    snapshots_.WriteLast();
  }
  const absl::Status stops = absl::UnavailableError("the server stops");
  snapshots_.EndRequests(stops);
  moves_.Close(stops);
}

std::optional<dispatch::Work> EngineImpl::NextWork() {
  const profile::Span span("wait for work");
  const absl::Duration wait = snapshots_.running() ? kSnapshotWait : kIdleWait;
  return dispatcher_.Next(
      sample_loop_.active(),
      std::clamp(moves_.next_due() - SteadyNow(), absl::ZeroDuration(), wait));
}

void EngineImpl::Run(dispatch::Work& work) {
  std::visit(
      Overloaded{
          [](dispatch::RunTasks& run) {
            const profile::Span span("tasks", "count",
                                     static_cast<int64_t>(run.tasks.size()));
            for (const dispatch::EngineTask& task : run.tasks) {
              task(absl::OkStatus());
            }
          },
          [this](dispatch::RunMove& run) {
            const profile::Span span("move adapter");
            mover_.Run(run.move);
          },
          [this](dispatch::RunTrain& run) {
            const TraceScope scope(TraceOf(run));
            const profile::Span span("train batch", "slices",
                                     static_cast<int64_t>(run.slices.size()));
            for (const StepSlice& slice : run.slices) NoteRunning(slice.step);
            trainer_.Run(run).IgnoreError();  // Run has reported the error.
          },
          [this](dispatch::RunStep& run) {
            const TraceScope scope(run.step.trace);
            const profile::Span span("step alone");
            NoteRunning(run.step);
            step_executor_.Run(run.step);
          },
          [this](dispatch::RunDecode&) {
            const profile::Span span("sample", "requests",
                                     sample_loop_.active());
            sample_runner_.Decode();
          },
          [this](dispatch::CancelSamples& run) {
            sample_runner_.End(run.ids,
                               absl::CancelledError("cancelled by the client"));
          },
          [this](dispatch::Idle&) { guard_.PingWhenDue(); }},
      work);
  // A step that loses the device, or another rank, stays noted: the process
  // will end because of it.
  if (parts_.running != nullptr && guard_.failure().ok()) parts_.running->End();
  MeterDeviceMemory();
}

void EngineImpl::NoteRunning(const StepTask& step) {
  if (parts_.running == nullptr || step.step == 0 || !guard_.failure().ok()) {
    return;
  }
  parts_.running->Begin(step.adapter, step.step, *step.digest);
}

void EngineImpl::MeterDeviceMemory() {
  // After a failure the device may be lost, and then Memory() would fail too.
  if (!failure().ok()) return;
  const DeviceMemory memory = parts_.device->Memory();
  probe_.SetDeviceMemory(memory.total, memory.reserved, memory.allocated);
}

}  // namespace weft::engine
