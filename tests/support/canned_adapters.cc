#include "tests/support/canned_adapters.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/tokens.h"
#include "tests/support/canned_results.h"

namespace weft {
namespace {

Durability Resolved(Durability durability) {
  return durability == Durability::kDefault ? Durability::kMemory : durability;
}

absl::Time ExpiryOf(absl::Time from, uint64_t ttl_seconds) {
  if (ttl_seconds == 0) return absl::InfiniteFuture();
  return from + absl::Seconds(static_cast<int64_t>(ttl_seconds));
}

}  // namespace

using dispatch::NoSuchAdapter;

void CannedAdapters::Create(CreateAdapterRequest request,
                            Callback<AdapterInfo> done) {
  request.durability = Resolved(request.durability);
  const Callback<AdapterInfo> reply =
      dispatcher_.adapters().AnswerRepeats(request, std::move(done));
  Post(reply, [this, request = std::move(request), reply] {
    MakeWhenRoom({.request = request,
                  .adapter = {.config = request.config,
                              .optimizer = request.optimizer,
                              .durability = request.durability}},
                 reply);
  });
}

void CannedAdapters::Delete(const std::string& adapter_id,
                            Callback<bool> done) {
  PostFor(adapter_id, done, [this, done](AdapterKey key) {
    adapters_.erase(key);
    (void)dispatcher_.adapters().Remove(key);
    Reply<bool>(done, true);
  });
}

void CannedAdapters::LoadNew(LoadCheckpointRequest request,
                             Callback<AdapterInfo> done) {
  PostIo([this, request = std::move(request), done = std::move(done)] {
    const absl::StatusOr<CheckpointInfo> info = Read(request);
    if (!info.ok()) return Reply<AdapterInfo>(done, info.status());
    NewAdapter made{.request = {.adapter_id = request.adapter_id,
                                .tenant = request.tenant,
                                .config = info->config},
                    .adapter = {.config = info->config,
                                .durability = Resolved(request.durability)}};
    made.adapter.optimizer = request.optimizer;
    if (!request.weights_only) {
      made.adapter.optim_steps = info->optim_steps;
      made.adapter.optimizer = info->optimizer;
      made.adapter.accumulated_tokens = info->accumulated_tokens;
      made.last_step = info->last_step;
    }
    Post(done,
         [this, made = std::move(made), done] { MakeWhenRoom(made, done); });
  });
}

void CannedAdapters::Import(ImportAdapterRequest request,
                            Callback<AdapterInfo> done) {
  Post(done, [this, request = std::move(request), done] {
    MakeWhenRoom({.request = {.adapter_id = request.adapter_id,
                              .tenant = request.tenant},
                  .adapter = {.files = request.files,
                              .durability = Resolved(request.durability)}},
                 done);
  });
}

void CannedAdapters::MakeWhenRoom(NewAdapter made, Callback<AdapterInfo> done) {
  const CreateAdapterRequest request = made.request;
  dispatcher_.adapters().WhenSlotFor(
      request.adapter_id, request.tenant,
      [this, made = std::move(made),
       done = std::move(done)](const absl::Status& room) {
        Reply(done, room.ok() ? Make(made) : room);
      });
}

absl::StatusOr<AdapterInfo> CannedAdapters::Make(const NewAdapter& made) {
  dispatch::AdapterDesk& desk = dispatcher_.adapters();
  const std::string& id = made.request.adapter_id;
  // Another adapter may have taken the name or the last slot since the first
  // check.
  const absl::Status taken = desk.CheckNew(id, made.request.tenant);
  if (!taken.ok()) {
    desk.ReturnSlot();
    return taken;
  }
  const AdapterKey key = desk.NewKey();
  adapters_[key] = made.adapter;
  desk.Add(key, id, made.request.tenant, made.last_step, Facts(key));
  return desk.Info(id);
}

dispatch::AdapterFacts CannedAdapters::Facts(AdapterKey key) const {
  const Adapter& adapter = adapters_.at(key);
  AdapterInfo info{.config = adapter.config,
                   .durability = adapter.durability,
                   .optim_steps = adapter.optim_steps,
                   .optimizer = adapter.optimizer,
                   .accumulated_tokens = adapter.accumulated_tokens,
                   .version = adapter.version,
                   .num_parameters = kCannedAdapterParameters,
                   .resident_bytes = kCannedAdapterBytes,
                   .location = adapter.location,
                   .created_at = kCannedCreation};
  for (const auto& [name, version] : adapter.snapshots) {
    info.snapshots.push_back(name);
  }
  return {.info = std::move(info), .image_bytes = kCannedAdapterBytes};
}

void CannedAdapters::Export(const ExportAdapterRequest& request,
                            Callback<PeftFiles> done) {
  PostFor(request.adapter_id, done, [this, done](AdapterKey key) {
    dispatcher_.adapters().WhenOnDevice(
        key, [this, key, done](const absl::Status& room) {
          if (!room.ok()) return Reply<PeftFiles>(done, room);
          PeftFiles files = adapters_.at(key).files;
          if (files.empty()) {
            files = {{"adapter_config.json", "{}"},
                     {"adapter_model.safetensors", "weights"}};
          }
          Reply<PeftFiles>(done, std::move(files));
        });
  });
}

void CannedAdapters::ReleaseSnapshot(const ReleaseSnapshotRequest& request,
                                     Callback<bool> done) {
  PostFor(request.adapter_id, done, [this, request, done](AdapterKey key) {
    if (adapters_.at(key).snapshots.erase(request.name) == 0) {
      return Reply<bool>(done, absl::NotFoundError(absl::StrCat(
                                   "name: no snapshot '", request.name, "'")));
    }
    dispatcher_.adapters().Publish(key, Facts(key));
    Reply<bool>(done, true);
  });
}

void CannedAdapters::ListCheckpoints(
    std::string adapter_id, Callback<std::vector<CheckpointInfo>> done) {
  PostIo([this, adapter_id = std::move(adapter_id), done = std::move(done)] {
    std::vector<CheckpointInfo> infos;
    for (const auto& [key, info] : checkpoints_) {
      if (key.first == adapter_id ||
          (NamesAll(adapter_id) && key.first.starts_with(adapter_id))) {
        infos.push_back(info);
      }
    }
    Reply<std::vector<CheckpointInfo>>(done, std::move(infos));
  });
}

void CannedAdapters::DeleteCheckpoint(std::string adapter_id, std::string name,
                                      Callback<bool> done) {
  PostIo([this, key = std::pair(std::move(adapter_id), std::move(name)),
          done = std::move(done)] {
    if (checkpoints_.erase(key) == 1) return Reply<bool>(done, true);
    Reply<bool>(done, absl::NotFoundError(absl::StrCat("name: no checkpoint '",
                                                       key.second, "'")));
  });
}

void CannedAdapters::SetCheckpointTtl(SetCheckpointTtlRequest request,
                                      Callback<CheckpointInfo> done) {
  PostIo([this, request = std::move(request), done = std::move(done)] {
    absl::StatusOr<CheckpointInfo> info =
        Read({.source_adapter_id = request.adapter_id, .name = request.name});
    if (info.ok()) {
      info->expires_at = ExpiryOf(absl::Now(), request.ttl_seconds);
      checkpoints_[{request.adapter_id, request.name}] = *info;
    }
    Reply(done, std::move(info));
  });
}

void CannedAdapters::Run(const StepTask& step) {
  const StepRequest& request = *step.request;
  if (const auto* save = std::get_if<SaveCheckpointRequest>(&request)) {
    Save(step, *save);
    return;
  }
  if (const auto* load = std::get_if<LoadCheckpointRequest>(&request)) {
    Load(step, *load);
    return;
  }
  Adapter& adapter = adapters_.at(step.adapter);
  StepResult result;
  if (const auto* optim = std::get_if<OptimStepRequest>(&request)) {
    if (!optim->discard) {
      ++adapter.optim_steps;
      ++adapter.version;
      adapter.optimizer = optim->optimizer();
    }
    result = OptimStepResult{
        .grad_norm = kCannedGradNorm,
        .version = adapter.version,
        .step = step.step,
        .accumulated_tokens = std::exchange(adapter.accumulated_tokens, 0)};
  } else {
    const auto& publish = std::get<PublishSnapshotRequest>(request);
    const auto [there, added] =
        adapter.snapshots.emplace(publish.name, adapter.version);
    if (there->second != adapter.version) {
      dispatcher_.steps().Complete(
          step.id, absl::AlreadyExistsError(absl::StrCat(
                       "name: snapshot '", publish.name, "' exists")));
      return;
    }
    result =
        PublishedSnapshot{.name = publish.name, .version = adapter.version};
  }
  dispatcher_.steps().Complete(step.id, std::move(result), Facts(step.adapter));
}

void CannedAdapters::Save(const StepTask& step,
                          const SaveCheckpointRequest& request) {
  const Adapter& adapter = adapters_.at(step.adapter);
  CheckpointInfo info{.adapter_id = request.adapter_id,
                      .name = request.name,
                      .last_step = step.step > 0 ? step.step : step.last_step,
                      .optim_steps = adapter.optim_steps,
                      .optimizer = adapter.optimizer,
                      .accumulated_tokens = adapter.accumulated_tokens,
                      .size_bytes = kCannedCheckpointBytes,
                      .created_at = kCannedCreation,
                      .config = adapter.config,
                      .kind = request.kind,
                      .metadata = request.metadata,
                      .base_model = kCannedBaseModel,
                      .base_fingerprint = kCannedFingerprint};
  if (const auto of = dispatcher_.adapters().Info(request.adapter_id);
      of.ok()) {
    info.tenant = of->tenant;
  }
  info.expires_at = ExpiryOf(info.created_at, request.ttl_seconds);
  PostIo([this, id = step.id, overwrite = request.overwrite,
          info = std::move(info)] {
    absl::StatusOr<StepResult> result = Write(info, overwrite);
    dispatcher_.Post(
        [this, id, result = std::move(result)](const absl::Status&) {
          dispatcher_.steps().Complete(id, result);
        });
  });
}

void CannedAdapters::Load(const StepTask& step,
                          const LoadCheckpointRequest& request) {
  PostIo([this, step, request] {
    dispatcher_.Post([this, step, request,
                      loaded = Read(request)](const absl::Status& open) {
      if (!open.ok()) return;
      const auto adapter = adapters_.find(step.adapter);
      absl::Status status = loaded.status();
      if (adapter == adapters_.end())
        status = NoSuchAdapter(request.adapter_id);
      if (!status.ok()) {
        dispatcher_.steps().Complete(step.id, status);
        return;
      }
      const bool whole = !request.weights_only;
      adapter->second.optim_steps = whole ? loaded->optim_steps : 0;
      adapter->second.accumulated_tokens =
          whole ? loaded->accumulated_tokens : 0;
      if (whole) adapter->second.optimizer = loaded->optimizer;
      ++adapter->second.version;
      dispatcher_.steps().Complete(
          step.id, AdapterInfo{.last_step = whole ? loaded->last_step : 0},
          Facts(step.adapter));
    });
  });
}

void CannedAdapters::DownloadCheckpoint(
    std::string adapter_id, std::string name,
    Callback<std::vector<FileSource>> done) {
  PostIo([this, adapter_id = std::move(adapter_id), name = std::move(name),
          done = std::move(done)] {
    const absl::StatusOr<CheckpointInfo> info =
        Read({.source_adapter_id = adapter_id, .name = name});
    if (!info.ok()) return Reply<std::vector<FileSource>>(done, info.status());
    Reply<std::vector<FileSource>>(
        done,
        std::vector<FileSource>{FileSource("adapter_config.json", "{}"),
                                FileSource("adapter_model.safetensors", ""),
                                FileSource("trainer_state.json", info->name)});
  });
}

void CannedAdapters::UploadCheckpoint(UploadCheckpointRequest request,
                                      Callback<CheckpointInfo> done) {
  PostIo([this, request = std::move(request), done = std::move(done)] {
    CheckpointInfo info{.size_bytes = kCannedCheckpointBytes,
                        .created_at = kCannedCreation,
                        .base_model = kCannedBaseModel,
                        .base_fingerprint = kCannedFingerprint};
    bool repeats = false;
    if (const std::string& source = request.source_adapter_id;
        !source.empty()) {
      const auto found =
          Read({.source_adapter_id = source, .name = request.name});
      if (!found.ok()) return Reply<CheckpointInfo>(done, found.status());
      info = *found;
      std::string& from = copied_from_[{request.adapter_id, request.name}];
      repeats = std::exchange(from, source) == source;
    }
    info.adapter_id = request.adapter_id;
    info.name = request.name;
    info.tenant = request.tenant;
    info.expires_at = ExpiryOf(info.created_at, request.ttl_seconds);
    Reply(done, Write(info, request.overwrite || repeats));
  });
}

void CannedAdapters::Run(const dispatch::Move& move) {
  adapters_.at(move.adapter).location = move.to;
  dispatcher_.adapters().Publish(move.adapter, Facts(move.adapter));
  dispatcher_.adapters().FinishMove(move, kCannedAdapterBytes,
                                    absl::OkStatus());
}

absl::StatusOr<uint64_t> CannedAdapters::Version(
    AdapterKey adapter, const SampleRequest& request) const {
  if (adapter == AdapterKey::kBaseModel) return 0;
  const Adapter& found = adapters_.at(adapter);
  if (request.snapshot.empty()) return found.version;
  const auto snapshot = found.snapshots.find(request.snapshot);
  if (snapshot == found.snapshots.end()) {
    return absl::NotFoundError(
        absl::StrCat("snapshot: no snapshot '", request.snapshot, "'"));
  }
  return snapshot->second;
}

absl::StatusOr<CheckpointInfo> CannedAdapters::Write(CheckpointInfo info,
                                                     bool overwrite) {
  const auto key = std::pair(info.adapter_id, info.name);
  if (checkpoints_.contains(key) && !overwrite) {
    return absl::AlreadyExistsError(
        absl::StrCat("name: checkpoint '", info.name, "' exists"));
  }
  checkpoints_[key] = info;
  return info;
}

absl::StatusOr<CheckpointInfo> CannedAdapters::Read(
    const LoadCheckpointRequest& request) const {
  const auto found =
      checkpoints_.find({request.source_adapter_id, request.name});
  if (found == checkpoints_.end()) {
    return absl::NotFoundError(
        absl::StrCat("name: no checkpoint '", request.name, "'"));
  }
  return found->second;
}

}  // namespace weft
