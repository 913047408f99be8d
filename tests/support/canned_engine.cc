#include "tests/support/canned_engine.h"

#include <algorithm>
#include <variant>

#include "src/base/reason.h"
#include "tests/support/filled_options.h"

namespace weft {
namespace {

constexpr absl::Duration kIdleWait = absl::Milliseconds(50);

// Few adapters fit on the device, so that tests make adapters move.
constexpr int kPlacesOnDevice = 2;

}  // namespace

CannedEngine::CannedEngine(EngineInfo info)
    : info_(std::move(info)),
      metrics_(&registry_),
      dispatcher_(
          dispatch::Filled({.residency = {.max_resident = kPlacesOnDevice,
                                          .host_bytes = 1 << 20},
                            .max_adapters = info_.max_adapters,
                            .max_adapters_per_tenant = info_.max_adapters}),
          {.clock = &clock_,
           .post_reply =
               [this](std::function<void()> task) {
                 replies_.Post(std::move(task));
               },
           .metrics = &metrics_}),
      adapters_(&dispatcher_, &io_, &replies_) {
  thread_ = std::thread([this] { Loop(); });
}

CannedEngine::~CannedEngine() {
  Release();
  dispatcher_.Stop();
  thread_.join();
  dispatcher_.Close(
      absl::UnavailableError("the server stopped before the request ran"));
}

void CannedEngine::FailNext(absl::Status status, std::string rpc) {
  MutexLock lock(&mu_);
  refusals_.emplace_back(std::move(rpc), std::move(status));
}

void CannedEngine::FailNextRun(absl::Status status, std::string rpc) {
  MutexLock lock(&mu_);
  run_failures_.emplace_back(std::move(rpc), std::move(status));
}

void CannedEngine::SetNotes(Notes notes) {
  MutexLock lock(&mu_);
  notes_ = std::move(notes);
}

void CannedEngine::PutNote(const std::string& name, std::string value,
                           std::function<void(const absl::Status&)> done) {
  MutexLock lock(&mu_);
  const absl::Status refused = Take(refusals_, "PutNote");
  if (!refused.ok()) return done(refused);
  notes_[name] = std::make_shared<const std::string>(std::move(value));
  replies_.Post([done = std::move(done)] { done(absl::OkStatus()); });
}

void CannedEngine::SetOwners(std::map<int, std::string> logs,
                             std::map<std::string, std::string> adapters) {
  MutexLock lock(&mu_);
  log_owners_ = std::move(logs);
  adapter_owners_ = std::move(adapters);
}

void CannedEngine::SetHeld(const std::string& unit) {
  MutexLock lock(&mu_);
  held_unit_ = unit;
}

absl::Status CannedEngine::CheckHeld(const std::string& unit) const {
  MutexLock lock(&mu_);
  if (held_unit_.empty() || unit != held_unit_) return absl::OkStatus();
  return WithReason(absl::UnavailableError("goes to another server"),
                    {.name = "ADAPTER_RECOVERING", .values = {}});
}

void CannedEngine::SetAgreed(std::string bytes) {
  MutexLock lock(&mu_);
  agreed_ = std::move(bytes);
}

std::string CannedEngine::OwnerOf(const std::string& adapter_id) const {
  MutexLock lock(&mu_);
  const auto found = adapter_owners_.find(adapter_id);
  return found == adapter_owners_.end() ? "" : found->second;
}

void CannedEngine::SetSampler(std::string address) {
  MutexLock lock(&mu_);
  sampler_ = std::move(address);
}

std::string CannedEngine::ChooseSampler() {
  MutexLock lock(&mu_);
  return sampler_;
}

void CannedEngine::FindOwner(const std::string& unit, int home,
                             Callback<std::string> done) {
  MutexLock lock(&mu_);
  absl::StatusOr<std::string> owner = absl::UnavailableError("no owner");
  if (const auto moved = adapter_owners_.find(unit);
      moved != adapter_owners_.end()) {
    owner = moved->second;
  } else if (home == info_.log || home >= info_.num_logs) {
    owner = absl::NotFoundError("no other log has it");
  } else if (const auto found = log_owners_.find(home);
             found != log_owners_.end()) {
    owner = found->second;
  }
  replies_.Post([done = std::move(done), owner] { done(owner); });
}

void CannedEngine::Agree(const std::string& /*name*/, const std::string& bytes,
                         Callback<std::string> done) {
  MutexLock lock(&mu_);
  if (agreed_.empty()) agreed_ = bytes;
  replies_.Post([done = std::move(done), agreed = agreed_] { done(agreed); });
}

void CannedEngine::EraseNote(const std::string& name) {
  MutexLock lock(&mu_);
  notes_.erase(name);
}

Notes CannedEngine::NotesWith(const std::string& prefix) const {
  MutexLock lock(&mu_);
  Notes notes = notes_;
  std::erase_if(notes, [&prefix](const auto& note) {
    return !note.first.starts_with(prefix);
  });
  return notes;
}

void CannedEngine::ExportNext(PeftFiles files) {
  MutexLock lock(&mu_);
  next_export_ = std::move(files);
}

void CannedEngine::Hold() {
  MutexLock lock(&mu_);
  if (held_) return;
  held_ = true;
  dispatcher_.Post([this](const absl::Status&) {
    MutexLock parking(&mu_);
    parked_ = true;
    changed_.NotifyAll();
    while (held_) changed_.Wait(&mu_);
    parked_ = false;
  });
  while (!parked_) changed_.Wait(&mu_);
}

void CannedEngine::Release() {
  MutexLock lock(&mu_);
  held_ = false;
  changed_.NotifyAll();
}

void CannedEngine::HangSince(std::optional<absl::Time> since) {
  MutexLock lock(&mu_);
  hangs_since_ = since;
}

void CannedEngine::FailForGood(absl::Status status) {
  MutexLock lock(&mu_);
  failure_ = std::move(status);
}

CannedEngine::Seen CannedEngine::seen() const {
  MutexLock lock(&mu_);
  return seen_;
}

absl::Status CannedEngine::failure() const {
  MutexLock lock(&mu_);
  return failure_;
}

absl::Time CannedEngine::last_heartbeat() const {
  MutexLock lock(&mu_);
  return hangs_since_.value_or(heartbeat_);
}

absl::Status CannedEngine::Take(Refusals& refusals, const std::string& rpc) {
  const auto found = std::ranges::find_if(refusals, [&](const auto& refusal) {
    return refusal.first.empty() || refusal.first == rpc;
  });
  if (found == refusals.end()) return absl::OkStatus();
  absl::Status status = std::move(found->second);
  refusals.erase(found);
  return status;
}

void CannedEngine::Loop() {
  while (std::optional<dispatch::Work> work = NextWork()) {
    Run(*work);
    profile_.BetweenWork(std::holds_alternative<dispatch::RunTrain>(*work) ||
                             std::holds_alternative<dispatch::RunStep>(*work) ||
                             std::holds_alternative<dispatch::RunDecode>(*work),
                         clock_.Now());
    MutexLock lock(&mu_);
    heartbeat_ = clock_.Now();
  }
}

std::optional<dispatch::Work> CannedEngine::NextWork() {
  const profile::Span span("wait for work");
  return dispatcher_.Next(static_cast<int>(running_.size()), kIdleWait);
}

void CannedEngine::Run(dispatch::Work& work) {
  if (auto* tasks = std::get_if<dispatch::RunTasks>(&work)) {
    for (const dispatch::EngineTask& task : tasks->tasks) {
      task(absl::OkStatus());
    }
  } else if (const auto* move = std::get_if<dispatch::RunMove>(&work)) {
    adapters_.Run(move->move);
  } else if (const auto* train = std::get_if<dispatch::RunTrain>(&work)) {
    RunBatch(*train);
  } else if (const auto* step = std::get_if<dispatch::RunStep>(&work)) {
    const profile::Span span("step alone");
    const StepTask& task = step->step;
    if (const auto* refused = std::get_if<RefusedStep>(task.request)) {
      dispatcher_.steps().Complete(task.id, refused->status);
    } else if (Start(task)) {
      adapters_.Run(task);
    }
  } else if (std::holds_alternative<dispatch::RunDecode>(work)) {
    Decode();
  } else if (auto* cancel = std::get_if<dispatch::CancelSamples>(&work)) {
    for (const uint64_t id : cancel->ids) {
      std::erase_if(running_, [id](const auto& r) { return r.task.id == id; });
      dispatcher_.samples().Finish(
          id, absl::CancelledError("cancelled by the client"));
    }
  }
}

void CannedEngine::RunBatch(const dispatch::RunTrain& train) {
  const profile::Span span("train batch", "slices",
                           static_cast<int64_t>(train.slices.size()));
  dispatch::StepDesk& desk = dispatcher_.steps();
  desk.CountTokens(train);
  for (const auto& [slice, step] : train.slices) {
    if (!slice.last) {
      if (!desk.FinishSlice(step.id)) {
        desk.Complete(step.id, absl::CancelledError("cancelled by the client"));
      }
      continue;
    }
    if (!Start(step)) continue;
    const auto& request = std::get<TrainRequest>(*step.request);
    if (request.backward) {
      adapters_.CountTrained(step.adapter, request.num_tokens());
    }
    desk.Complete(step.id, CannedTrain(request, step.step));
  }
}

const char* CannedEngine::RpcOf(const StepRequest& request) {
  if (const auto* train = std::get_if<TrainRequest>(&request)) {
    return train->backward ? "ForwardBackward" : "Forward";
  }
  constexpr const char* kNames[] = {"", "OptimStep", "SaveCheckpoint",
                                    "LoadCheckpoint", "PublishSnapshot"};
  return kNames[request.index()];
}

bool CannedEngine::Start(const StepTask& step) {
  const std::string rpc = RpcOf(*step.request);
  absl::Status failure;
  {
    MutexLock lock(&mu_);
    failure = Take(run_failures_, rpc);
    if (failure.ok()) seen_.applied.emplace_back(rpc, step.step);
  }
  if (!failure.ok()) dispatcher_.steps().Complete(step.id, failure);
  return failure.ok();
}

void CannedEngine::Decode() {
  dispatch::SampleDesk& desk = dispatcher_.samples();
  while (const std::optional<dispatch::SampleTask> task = desk.Take()) {
    const absl::StatusOr<uint64_t> version =
        adapters_.Version(task->adapter, *task->request);
    if (!version.ok()) {
      desk.Finish(task->id, version.status());
      continue;
    }
    Running& running = running_.emplace_back();
    running.task = *task;
    running.result.samples.resize(task->request->num_samples);
    running.result.prompt_logprobs = CannedPromptLogprobs(*task->request);
    running.result.prompt_top_logprobs = CannedPromptTop(*task->request);
    FillCannedPrompt(*task->request, &running.result);
    running.result.version = *version;
    desk.Start(*task);
  }
  for (Running& running : running_) Draw(running);
  std::erase_if(running_, [&desk](Running& running) {
    if (running.position < running.task.request->config.max_tokens)
      return false;
    desk.Finish(running.task.id, std::move(running.result));
    return true;
  });
}

void CannedEngine::Draw(Running& running) {
  const SampleRequest& request = *running.task.request;
  std::vector<SampleDelta> deltas;
  for (int i = 0; i < request.num_samples; ++i) {
    weft::Sample piece =
        CannedToken(request, info_.vocab_size, i, running.position);
    weft::Sample& whole = running.result.samples[i];
    whole.tokens.push_back(piece.tokens.front());
    whole.logprobs.push_back(piece.logprobs.front());
    if (!piece.top_logprobs.empty()) {
      whole.top_logprobs.push_back(piece.top_logprobs.front());
    }
    if (request.in_flight && running.position < 2) {
      whole.version_spans.push_back(piece.version_spans.front());
    } else if (request.in_flight) {
      ++whole.version_spans.back().tokens;
    }
    whole.finish_reason = piece.finish_reason;
    SampleDelta& delta = deltas.emplace_back();
    delta.sample_index = i;
    delta.piece = std::move(piece);
    delta.version = running.result.version;
  }
  if (running.position == 0) {
    deltas.front().prompt_logprobs = running.result.prompt_logprobs;
    deltas.front().prompt_top_logprobs = running.result.prompt_top_logprobs;
    deltas.front().prompt_target_logprobs =
        running.result.prompt_target_logprobs;
    deltas.front().prompt_alternatives = running.result.prompt_alternatives;
    deltas.front().prompt_cached_tokens = running.result.prompt_cached_tokens;
  }
  ++running.position;
  if (running.task.streams) {
    dispatcher_.samples().Deliver(running.task.id, std::move(deltas));
  }
}

}  // namespace weft
