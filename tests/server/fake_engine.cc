#include "tests/server/fake_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft {
namespace {

// Fixed, so that replies can be compared.
const absl::Time kCreated = absl::FromUnixSeconds(1700000000);

}  // namespace

FakeEngine::FakeEngine() {
  info_ = {.device = "cpu",
           .dtype = "f32",
           .architecture = "fake",
           .num_layers = 2,
           .hidden_size = 8,
           .vocab_size = 100,
           .context_length = 32,
           .eos_token_ids = {2},
           .num_parameters = 12345,
           .max_adapters = 4,
           .max_rank = 64,
           .has_byte_decoder = false};
}

FakeEngine::~FakeEngine() = default;

void FakeEngine::FailNext(absl::Status status) {
  MutexLock lock(&mu_);
  failure_ = std::move(status);
}

void FakeEngine::Hold() {
  MutexLock lock(&mu_);
  held_ = true;
}

void FakeEngine::Release() {
  {
    MutexLock lock(&mu_);
    held_ = false;
  }
  RunReady();
}

size_t FakeEngine::num_waiting() const {
  MutexLock lock(&mu_);
  return waiting_.size();
}

size_t FakeEngine::num_cancelled() const {
  MutexLock lock(&mu_);
  return num_cancelled_;
}

TrainRequest FakeEngine::last_train() const {
  MutexLock lock(&mu_);
  return last_train_;
}

OptimStepRequest FakeEngine::last_optim() const {
  MutexLock lock(&mu_);
  return last_optim_;
}

SampleRequest FakeEngine::last_sample() const {
  MutexLock lock(&mu_);
  return last_sample_;
}

absl::Status FakeEngine::TakeFailure() {
  MutexLock lock(&mu_);
  if (draining_) return absl::UnavailableError("draining");
  return std::exchange(failure_, absl::OkStatus());
}

absl::StatusOr<FakeEngine::Adapter*> FakeEngine::Find(const std::string& id) {
  const auto found = adapters_.find(id);
  if (found == adapters_.end()) {
    return absl::NotFoundError(absl::StrCat("no adapter ", id));
  }
  return &found->second;
}

CancelHandle FakeEngine::Enqueue(Waiting waiting) {
  uint64_t id = 0;
  {
    MutexLock lock(&mu_);
    id = waiting.id = next_id_++;
    waiting_.push_back(std::move(waiting));
  }
  RunReady();
  return CancelHandle([this, id] {
    std::function<void()> cancel;
    {
      MutexLock lock(&mu_);
      const auto found =
          std::find_if(waiting_.begin(), waiting_.end(),
                       [id](const Waiting& w) { return w.id == id; });
      if (found == waiting_.end()) return;
      cancel = std::move(found->cancel);
      waiting_.erase(found);
      ++num_cancelled_;
    }
    cancel();
  });
}

void FakeEngine::RunReady() {
  while (true) {
    std::function<void()> run;
    std::vector<Callback<bool>> drains;
    {
      MutexLock lock(&mu_);
      auto found = waiting_.end();
      if (!held_) {
        found = std::find_if(waiting_.begin(), waiting_.end(),
                             [](const Waiting& w) { return w.ready(); });
      }
      if (found != waiting_.end()) {
        run = std::move(found->run);
        waiting_.erase(found);
      } else if (draining_ && waiting_.empty()) {
        drains.swap(drains_);
      }
    }
    if (run) {
      run();
      continue;
    }
    for (const auto& done : drains) done(true);
    return;
  }
}

bool FakeEngine::IsTurn(const std::string& adapter_id, uint64_t step) {
  if (step == 0) return true;
  const auto found = adapters_.find(adapter_id);
  return found == adapters_.end() || step <= found->second.info.last_step + 1;
}

CancelHandle FakeEngine::Train(TrainRequest request,
                               Callback<StepReply<TrainResult>> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    done(failure);
    return {};
  }
  {
    MutexLock lock(&mu_);
    last_train_ = request;
  }
  const auto shared = std::make_shared<TrainRequest>(std::move(request));
  return Enqueue(
      {.ready =
           [this, shared]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
             return IsTurn(shared->adapter_id, shared->step);
           },
       .run = [this, shared, done] { done(RunTrain(*shared)); },
       .cancel = [done] { done(absl::CancelledError("cancelled")); }});
}

absl::StatusOr<StepReply<TrainResult>> FakeEngine::RunTrain(
    const TrainRequest& request) {
  TrainResult result;
  double sum = 0;
  for (const Datum& datum : request.data) {
    DatumResult& out = result.data.emplace_back();
    for (size_t i = 0; i < datum.targets.size(); ++i) {
      const float weight = datum.weights.empty() ? 1.0F : datum.weights[i];
      const float logprob = -static_cast<float>(datum.targets[i] + 1) / 8;
      out.logprobs.push_back(logprob);
      out.losses.push_back(-weight * logprob);
      sum += out.losses.back();
    }
    if (request.loss.return_entropy) {
      out.entropies.assign(datum.tokens.size(), 0.5F);
    }
  }
  result.metrics["loss:sum"] = sum;
  MutexLock lock(&mu_);
  if (request.adapter_id.empty()) {
    return StepReply<TrainResult>{.result = result};
  }
  WEFT_ASSIGN_OR_RETURN(Adapter * adapter, Find(request.adapter_id));
  const uint64_t step =
      request.step == 0 ? adapter->info.last_step + 1 : request.step;
  if (step <= adapter->info.last_step) {
    const auto old = adapter->train_payloads.find(step);
    if (old == adapter->train_payloads.end() ||
        old->second.data != request.data ||
        !(old->second.loss == request.loss)) {
      return absl::AlreadyExistsError(
          absl::StrCat("step ", step, " was taken by another payload"));
    }
    return StepReply<TrainResult>{.result = adapter->train_replies[step],
                                  .replayed = true};
  }
  result.step = step;
  adapter->info.last_step = step;
  adapter->train_payloads[step] = request;
  adapter->train_replies[step] = result;
  return StepReply<TrainResult>{.result = result};
}

CancelHandle FakeEngine::OptimStep(OptimStepRequest request,
                                   Callback<StepReply<OptimStepResult>> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    done(failure);
    return {};
  }
  {
    MutexLock lock(&mu_);
    last_optim_ = request;
  }
  const auto shared = std::make_shared<OptimStepRequest>(std::move(request));
  return Enqueue(
      {.ready =
           [this, shared]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
             return IsTurn(shared->adapter_id, shared->step);
           },
       .run = [this, shared, done] { done(RunOptim(*shared)); },
       .cancel = [done] { done(absl::CancelledError("cancelled")); }});
}

absl::StatusOr<StepReply<OptimStepResult>> FakeEngine::RunOptim(
    const OptimStepRequest& request) {
  MutexLock lock(&mu_);
  WEFT_ASSIGN_OR_RETURN(Adapter * adapter, Find(request.adapter_id));
  const uint64_t step =
      request.step == 0 ? adapter->info.last_step + 1 : request.step;
  if (step <= adapter->info.last_step) {
    const auto old = adapter->optim_replies.find(step);
    if (old == adapter->optim_replies.end() ||
        !(old->second.first == request.adamw)) {
      return absl::AlreadyExistsError(
          absl::StrCat("step ", step, " was taken by another payload"));
    }
    return StepReply<OptimStepResult>{.result = old->second.second,
                                      .replayed = true};
  }
  adapter->info.last_step = step;
  ++adapter->info.optim_steps;
  const OptimStepResult result = {
      .grad_norm = 2.5, .version = ++adapter->info.version, .step = step};
  adapter->optim_replies[step] = {request.adamw, result};
  return StepReply<OptimStepResult>{.result = result};
}

CancelHandle FakeEngine::Sample(SampleRequest request,
                                std::function<void(SampleDelta)> on_delta,
                                Callback<SampleResult> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    done(failure);
    return {};
  }
  {
    MutexLock lock(&mu_);
    last_sample_ = request;
    if (!request.adapter_id.empty()) {
      if (!Find(request.adapter_id).ok()) request.num_samples = 0;
    }
  }
  const auto shared = std::make_shared<SampleRequest>(std::move(request));
  const auto run = [this, shared, on_delta, done] {
    if (shared->num_samples == 0) {
      return done(absl::NotFoundError("no such adapter"));
    }
    SampleResult result = RunSample(*shared);
    for (size_t i = 0; on_delta && i < result.samples.size(); ++i) {
      const weft::Sample& sample = result.samples[i];
      for (size_t t = 0; t < sample.tokens.size(); ++t) {
        SampleDelta delta;
        delta.sample_index = static_cast<int>(i);
        delta.piece.tokens = {sample.tokens[t]};
        delta.piece.logprobs = {sample.logprobs[t]};
        if (!sample.top_logprobs.empty()) {
          delta.piece.top_logprobs = {sample.top_logprobs[t]};
        }
        if (t + 1 == sample.tokens.size()) {
          delta.piece.finish_reason = sample.finish_reason;
        }
        if (i == 0 && t == 0) delta.prompt_logprobs = result.prompt_logprobs;
        delta.version = result.version;
        on_delta(delta);
      }
    }
    done(std::move(result));
  };
  return Enqueue(
      {.ready = [] { return true; },
       .run = run,
       .cancel = [done] { done(absl::CancelledError("cancelled")); }});
}

SampleResult FakeEngine::RunSample(const SampleRequest& request) const {
  SampleResult result;
  result.version = request.adapter_id.empty() ? 0 : 1;
  if (request.prompt_logprobs) {
    result.prompt_logprobs.assign(request.prompt.size(), -1.0F);
    result.prompt_logprobs[0] = 0;
  }
  const auto vocab = static_cast<uint64_t>(info_.vocab_size);
  for (int i = 0; i < request.num_samples; ++i) {
    weft::Sample& sample = result.samples.emplace_back();
    for (int t = 0; t < request.config.max_tokens; ++t) {
      const auto offset = static_cast<uint64_t>(i + t);
      const auto token =
          static_cast<int32_t>((request.config.seed % vocab + offset) % vocab);
      sample.tokens.push_back(token);
      sample.logprobs.push_back(-0.25F);
      if (request.top_logprobs > 0) {
        sample.top_logprobs.emplace_back(
            static_cast<size_t>(request.top_logprobs),
            std::make_pair(token, -0.25F));
      }
    }
    sample.finish_reason = FinishReason::kLength;
  }
  return result;
}

void FakeEngine::CreateAdapter(CreateAdapterRequest request,
                               Callback<AdapterInfo> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    return done(failure);
  }
  const auto create = [&]() -> absl::StatusOr<AdapterInfo> {
    MutexLock lock(&mu_);
    const auto found = adapters_.find(request.adapter_id);
    if (found != adapters_.end()) {
      if (found->second.info.config == request.config &&
          found->second.info.tenant == request.tenant &&
          found->second.info.last_step == 0) {
        return found->second.info;
      }
      return absl::AlreadyExistsError(
          absl::StrCat("adapter ", request.adapter_id, " exists"));
    }
    if (adapters_.size() >= static_cast<size_t>(info_.max_adapters)) {
      return absl::ResourceExhaustedError("all adapter slots are in use");
    }
    AdapterInfo& info = adapters_[request.adapter_id].info;
    info.adapter_id = request.adapter_id;
    info.tenant = request.tenant;
    info.config = request.config;
    info.version = 1;
    info.num_parameters = 1000;
    info.resident_bytes = 16000;
    info.created_at = kCreated;
    return info;
  };
  done(create());
}

void FakeEngine::GetAdapter(std::string adapter_id,
                            Callback<AdapterInfo> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    return done(failure);
  }
  const auto get = [&]() -> absl::StatusOr<AdapterInfo> {
    MutexLock lock(&mu_);
    WEFT_ASSIGN_OR_RETURN(Adapter * adapter, Find(adapter_id));
    return adapter->info;
  };
  done(get());
}

void FakeEngine::ListAdapters(Callback<std::vector<AdapterInfo>> done) {
  std::vector<AdapterInfo> infos;
  {
    MutexLock lock(&mu_);
    for (const auto& [id, adapter] : adapters_) infos.push_back(adapter.info);
  }
  // Out of order: whoever lists them must sort.
  std::reverse(infos.begin(), infos.end());
  done(std::move(infos));
}

void FakeEngine::DeleteAdapter(std::string adapter_id, Callback<bool> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    return done(failure);
  }
  bool erased = false;
  {
    MutexLock lock(&mu_);
    erased = adapters_.erase(adapter_id) == 1;
  }
  if (erased) return done(true);
  done(absl::NotFoundError(absl::StrCat("no adapter ", adapter_id)));
}

CancelHandle FakeEngine::SaveCheckpoint(
    SaveCheckpointRequest request, Callback<StepReply<CheckpointInfo>> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    done(failure);
    return {};
  }
  const auto save = [&]() -> absl::StatusOr<StepReply<CheckpointInfo>> {
    MutexLock lock(&mu_);
    WEFT_ASSIGN_OR_RETURN(Adapter * adapter, Find(request.adapter_id));
    const auto key = std::make_pair(request.adapter_id, request.name);
    if (checkpoints_.contains(key) && !request.overwrite) {
      return absl::AlreadyExistsError(
          absl::StrCat("checkpoint ", request.name, " exists"));
    }
    checkpoints_[key] = {.adapter_id = request.adapter_id,
                         .name = request.name,
                         .last_step = adapter->info.last_step,
                         .optim_steps = adapter->info.optim_steps,
                         .size_bytes = 4096,
                         .created_at = kCreated,
                         .config = adapter->info.config};
    return StepReply<CheckpointInfo>{.result = checkpoints_[key]};
  };
  done(save());
  return {};
}

CancelHandle FakeEngine::LoadCheckpoint(LoadCheckpointRequest request,
                                        Callback<StepReply<AdapterInfo>> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    done(failure);
    return {};
  }
  const auto load = [&]() -> absl::StatusOr<StepReply<AdapterInfo>> {
    MutexLock lock(&mu_);
    const auto found =
        checkpoints_.find({request.source_adapter_id, request.name});
    if (found == checkpoints_.end()) {
      return absl::NotFoundError(absl::StrCat("no checkpoint ", request.name));
    }
    const bool is_new = !adapters_.contains(request.adapter_id);
    AdapterInfo& info = adapters_[request.adapter_id].info;
    info.adapter_id = request.adapter_id;
    if (is_new) info.tenant = request.tenant;
    info.config = found->second.config;
    info.last_step = request.weights_only ? 0 : found->second.last_step;
    info.created_at = kCreated;
    ++info.version;
    return StepReply<AdapterInfo>{.result = info};
  };
  done(load());
  return {};
}

void FakeEngine::ListCheckpoints(std::string adapter_id,
                                 Callback<std::vector<CheckpointInfo>> done) {
  std::vector<CheckpointInfo> infos;
  {
    MutexLock lock(&mu_);
    for (const auto& [key, info] : checkpoints_) {
      if (adapter_id.empty() || key.first == adapter_id) infos.push_back(info);
    }
  }
  done(std::move(infos));
}

void FakeEngine::DeleteCheckpoint(std::string adapter_id, std::string name,
                                  Callback<bool> done) {
  bool erased = false;
  {
    MutexLock lock(&mu_);
    erased = checkpoints_.erase({adapter_id, name}) == 1;
  }
  if (erased) return done(true);
  done(absl::NotFoundError(absl::StrCat("no checkpoint ", name)));
}

CancelHandle FakeEngine::PublishSnapshot(
    PublishSnapshotRequest request,
    Callback<StepReply<PublishedSnapshot>> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    done(failure);
    return {};
  }
  const auto publish = [&]() -> absl::StatusOr<StepReply<PublishedSnapshot>> {
    MutexLock lock(&mu_);
    WEFT_ASSIGN_OR_RETURN(Adapter * adapter, Find(request.adapter_id));
    adapter->info.snapshots.push_back(request.name);
    return StepReply<PublishedSnapshot>{
        .result = {.version = adapter->info.version}};
  };
  done(publish());
  return {};
}

void FakeEngine::ReleaseSnapshot(ReleaseSnapshotRequest request,
                                 Callback<bool> done) {
  const auto release = [&]() -> absl::StatusOr<bool> {
    MutexLock lock(&mu_);
    WEFT_ASSIGN_OR_RETURN(Adapter * adapter, Find(request.adapter_id));
    if (std::erase(adapter->info.snapshots, request.name) == 0) {
      return absl::NotFoundError(absl::StrCat("no snapshot ", request.name));
    }
    return true;
  };
  done(release());
}

void FakeEngine::ExportAdapter(ExportAdapterRequest request,
                               Callback<PeftFiles> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    return done(failure);
  }
  const auto get = [&]() -> absl::StatusOr<PeftFiles> {
    MutexLock lock(&mu_);
    WEFT_ASSIGN_OR_RETURN(Adapter * adapter, Find(request.adapter_id));
    if (!adapter->files.empty()) return adapter->files;
    return PeftFiles{{"adapter_config.json", "{}"},
                     {"adapter_model.safetensors", "weights"}};
  };
  done(get());
}

void FakeEngine::ImportAdapter(ImportAdapterRequest request,
                               Callback<AdapterInfo> done) {
  if (absl::Status failure = TakeFailure(); !failure.ok()) {
    return done(failure);
  }
  AdapterInfo info;
  {
    MutexLock lock(&mu_);
    Adapter& adapter = adapters_[request.adapter_id];
    adapter.info.adapter_id = request.adapter_id;
    adapter.info.tenant = request.tenant;
    adapter.info.version = 1;
    adapter.info.created_at = kCreated;
    adapter.files = std::move(request.files);
    info = adapter.info;
  }
  done(info);
}

void FakeEngine::Drain(Callback<bool> done) {
  {
    MutexLock lock(&mu_);
    draining_ = true;
    drains_.push_back(std::move(done));
  }
  RunReady();
}

}  // namespace weft
