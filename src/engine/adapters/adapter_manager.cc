#include "src/engine/adapters/adapter_manager.h"

#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/adapters/state_image.h"
#include "src/lora/expert_rank.h"
#include "src/request/move_unit.h"

namespace weft::engine {

using dispatch::NoSuchAdapter;

void AdapterManager::Create(CreateAdapterRequest request,
                            Callback<AdapterInfo> done) {
  const model_config::ModelShape& shape = context_.adapters.shape();
  absl::StatusOr<LoraConfig> config =
      lora::WithExpertRank(request.config, shape);
  absl::Status status = config.ok() ? CheckRanks(*config) : config.status();
  if (status.ok()) status = Resolve(&request.durability);
  if (!status.ok()) return context_.Reply(done, status);
  request.config = *std::move(config);
  const Callback<AdapterInfo> reply =
      context_.dispatcher.adapters().AnswerRepeats(request, std::move(done));
  Post(reply, [this, request = std::move(request), reply] {
    MakeWhenRoom(
        {.request = request, .state = {.optimizer = request.optimizer}}, reply);
  });
}

void AdapterManager::Delete(std::string adapter_id, Callback<bool> done) {
  Post(done, [this, adapter_id = std::move(adapter_id), done] {
    const absl::Status ready =
        context_.dispatcher.adapters().CheckReady(adapter_id);
    if (!ready.ok()) return context_.Reply(done, ready);
    if (!Forget(adapter_id)) {
      return context_.Reply(done, NoSuchAdapter(adapter_id));
    }
    Log(LogLevel::kInfo, "adapter deleted", {{"adapter", adapter_id}});
    context_.Reply(done, true);
  });
}

bool AdapterManager::Forget(const std::string& adapter_id) {
  const std::optional<AdapterKey> key =
      context_.dispatcher.adapters().KeyOf(adapter_id);
  if (!key || *key == AdapterKey::kBaseModel) return false;
  Remove(*key);
  context_.recorder.Write(log::RemovedRecord{.key = *key});
  FreeName(adapter_id);
  return true;
}

void AdapterManager::WhenClaimed(
    const std::string& adapter_id, const std::string& tenant,
    std::function<void(const absl::Status&)> then) {
  if (context_.directory == nullptr) return then(absl::OkStatus());
  // The limits are checked again when the adapter has a slot.
  const absl::Status fits =
      context_.dispatcher.adapters().CheckNew(adapter_id, tenant);
  context_.PostIo(
      adapter_id, [this, adapter_id, fits, elsewhere = sends_elsewhere_,
                   then = std::move(then)] {
        absl::Status claimed = fits;
        if (!fits.ok()) {
          claimed = context_.directory->Find(adapter_id);
          if (claimed.ok()) claimed = fits;
        } else if (elsewhere) {
          claimed = context_.directory->SendElsewhere(adapter_id);
        } else {
          claimed = context_.directory->Claim(adapter_id);
        }
        context_.dispatcher.Post(
            [this, adapter_id, claimed, then](const absl::Status& open) {
              if (claimed.ok() && !open.ok())
                EndClaim(adapter_id, /*made=*/false);
              then(claimed.ok() ? open : claimed);
            });
      });
}

void AdapterManager::EndClaim(const std::string& adapter_id, bool made) {
  if (context_.directory == nullptr) return;
  context_.directory->EndClaim(adapter_id);
  if (!made) FreeName(adapter_id);
}

void AdapterManager::FreeName(const std::string& adapter_id) const {
  if (context_.directory == nullptr) return;
  context_.recorder.WhenDurable([this, adapter_id] {
    context_.PostIo(adapter_id, [this, adapter_id] {
      const absl::Status freed =
          context_.directory->Free(adapter_id, [this, &adapter_id] {
            // A unit that arrives from another log has the name, too.
            const std::string unit = UnitOf(adapter_id);
            return !context_.dispatcher.adapters()
                        .CheckReady(adapter_id)
                        .ok() ||
                   !context_.dispatcher.recovery().AdaptersOf(unit).empty() ||
                   context_.recorder.HasNotes(unit);
          });
      if (freed.ok()) return;
      // The name stays this log's, which may use it again.
      Log(LogLevel::kWarning, "the name of an adapter could not be freed",
          {{"adapter", adapter_id}, {"reason", freed.message()}});
    });
  });
}

void AdapterManager::Remove(AdapterKey key) {
  context_.before_change(key);
  const ImageFile file = context_.adapters.File(key);
  context_.adapters.Erase(key);
  for (const uint64_t step_id : context_.dispatcher.adapters().Remove(key)) {
    forget_step_(step_id);
  }
  mover_.RemoveFile(file);
}

absl::Status AdapterManager::Resolve(Durability* durability) const {
  const bool has_log = context_.state != nullptr;
  if (*durability == Durability::kDefault) {
    *durability = has_log ? Durability::kStep : Durability::kMemory;
  }
  if (has_log || *durability == Durability::kMemory) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "durability: step needs a server with --state-dir");
}

absl::Status AdapterManager::CheckRanks(const LoraConfig& config) const {
  const model_config::ModelShape& shape = context_.adapters.shape();
  return lora::CheckRanks(lora::AdapterLayout(shape, config), shape.experts,
                          context_.options.max_rank);
}

absl::StatusOr<CheckpointInfo> AdapterManager::DescribeLoad(
    const LoadCheckpointRequest& request) const {
  WEFT_ASSIGN_OR_RETURN(CheckpointInfo info, context_.files.Describe(request));
  if (const absl::Status ranks = CheckRanks(info.config); !ranks.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "name: checkpoint '", request.name, "': ", ranks.message()));
  }
  return info;
}

void AdapterManager::LoadNew(LoadCheckpointRequest request,
                             Callback<AdapterInfo> done) {
  if (const absl::Status status = Resolve(&request.durability); !status.ok()) {
    return context_.Reply(done, status);
  }
  const std::string adapter_id = request.adapter_id;
  context_.PostIo(
      adapter_id, [this, request = std::move(request), done = std::move(done)] {
        const absl::Status refused = DescribeLoad(request).status();
        if (!refused.ok()) return context_.Reply(done, refused);
        Post(done, [this, request, done] { ReadWhenRoom(request, done); });
      });
}

void AdapterManager::ReadWhenRoom(const LoadCheckpointRequest& request,
                                  const Callback<AdapterInfo>& done) {
  WhenClaimed(request.adapter_id, request.tenant,
              [this, request, done](const absl::Status& claimed) {
                if (!claimed.ok()) return context_.Reply(done, claimed);
                // Reads the tensors only when the adapter has a slot
                // (AdapterDesk::WhenSlot). So the loads that wait for a slot
                // hold no tensors in memory.
                context_.dispatcher.adapters().WhenSlotFor(
                    request.adapter_id, request.tenant,
                    [this, request, done](const absl::Status& room) {
                      if (room.ok()) return ReadThenMake(request, done);
                      EndClaim(request.adapter_id, /*made=*/false);
                      context_.Reply(done, room);
                    });
              });
}

void AdapterManager::ReadThenMake(const LoadCheckpointRequest& request,
                                  const Callback<AdapterInfo>& done) {
  context_.PostIo(request.adapter_id, [this, request, done] {
    Post(done, [this, request, done, read = ReadLoad(request)] {
      if (read.ok()) {
        context_.Reply(done, Make(*read));
      } else {
        context_.dispatcher.adapters().ReturnSlot();
        EndClaim(request.adapter_id, /*made=*/false);
        context_.Reply(done, read.status());
      }
    });
  });
}

absl::StatusOr<AdapterManager::NewAdapter> AdapterManager::ReadLoad(
    const LoadCheckpointRequest& request) const {
  WEFT_ASSIGN_OR_RETURN(LoadedCheckpoint loaded, context_.files.Load(request));
  if (request.weights_only) loaded.state.optimizer = request.optimizer;
  NewAdapter adapter{.request = {.adapter_id = request.adapter_id,
                                 .tenant = request.tenant,
                                 .config = std::move(loaded.info.config),
                                 .durability = request.durability},
                     .state = std::move(loaded.state),
                     .last_step = loaded.info.last_step};
  WEFT_ASSIGN_OR_RETURN(adapter.image,
                        KeepState(context_, request.durability, adapter.state));
  return adapter;
}

void AdapterManager::Import(ImportAdapterRequest request,
                            Callback<AdapterInfo> done) {
  if (const absl::Status status = Resolve(&request.durability); !status.ok()) {
    return context_.Reply(done, status);
  }
  const std::string adapter_id = request.adapter_id;
  context_.PostIo(
      adapter_id, [this, request = std::move(request), done = std::move(done)] {
        absl::StatusOr<NewAdapter> adapter = ReadImport(request);
        if (!adapter.ok()) return context_.Reply(done, adapter.status());
        Post(done, [this, adapter = *std::move(adapter), done]() mutable {
          MakeWhenRoom(std::move(adapter), done);
        });
      });
}

absl::StatusOr<AdapterManager::NewAdapter> AdapterManager::ReadImport(
    const ImportAdapterRequest& request) const {
  WEFT_ASSIGN_OR_RETURN(lora::PeftAdapter peft,
                        context_.files.Import(request.files));
  if (const absl::Status ranks = CheckRanks(peft.config); !ranks.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("adapter_config.json: ", ranks.message()));
  }
  // Calls CheckNew before KeepState, so that KeepState writes no file for an
  // adapter that cannot be created.
  WEFT_RETURN_IF_ERROR(context_.dispatcher.adapters().CheckNew(
      request.adapter_id, request.tenant));
  NewAdapter adapter{.request = {.adapter_id = request.adapter_id,
                                 .tenant = request.tenant,
                                 .config = std::move(peft.config),
                                 .durability = request.durability},
                     .state = {.weights = std::move(peft.weights)}};
  WEFT_ASSIGN_OR_RETURN(adapter.image,
                        KeepState(context_, request.durability, adapter.state));
  return adapter;
}

void AdapterManager::MakeWhenRoom(NewAdapter adapter,
                                  Callback<AdapterInfo> done) {
  const CreateAdapterRequest request = adapter.request;
  const auto made = std::make_shared<const NewAdapter>(std::move(adapter));
  WhenClaimed(request.adapter_id, request.tenant,
              [this, request, made, done](const absl::Status& claimed) {
                if (!claimed.ok()) {
                  DropState(context_, made->image);
                  return context_.Reply(done, claimed);
                }
                context_.dispatcher.adapters().WhenSlotFor(
                    request.adapter_id, request.tenant,
                    [this, request, made, done](const absl::Status& room) {
                      if (room.ok()) return context_.Reply(done, Make(*made));
                      DropState(context_, made->image);
                      EndClaim(request.adapter_id, /*made=*/false);
                      context_.Reply(done, room);
                    });
              });
}

absl::StatusOr<AdapterInfo> AdapterManager::Make(const NewAdapter& adapter) {
  const CreateAdapterRequest& request = adapter.request;
  dispatch::AdapterDesk& desk = context_.dispatcher.adapters();
  const AdapterKey key = desk.NewKey();
  // The log stores times in microseconds, so `now` has whole microseconds.
  const absl::Time now = absl::FromUnixMicros(absl::ToUnixMicros(absl::Now()));
  // Since the first check, another adapter may have taken the name, or the last
  // place that a limit allows.
  absl::Status status = desk.CheckNew(request.adapter_id, request.tenant);
  if (status.ok()) {
    status = MakeTensors(key, request.config, adapter.state, now);
  }
  if (!status.ok()) {
    desk.ReturnSlot();
    DropState(context_, adapter.image);
    EndClaim(request.adapter_id, /*made=*/false);
    return status;
  }
  dispatch::AdapterFacts facts = context_.adapters.Facts(key);
  facts.info.epoch = desk.NewEpoch();
  facts.info.durability = request.durability;
  desk.Add(key, request.adapter_id, request.tenant, adapter.last_step, facts);
  Record(key, adapter, facts.info);
  EndClaim(request.adapter_id, /*made=*/true);
  Log(LogLevel::kInfo, "adapter created",
      {{"adapter", request.adapter_id},
       {"tenant", request.tenant},
       {"rank", request.config.rank}});
  return desk.Info(request.adapter_id);
}

absl::Status AdapterManager::MakeAgain(const log::StoredAdapter& adapter) {
  const absl::Status status =
      MakeTensors(adapter.key, adapter.config, {.optimizer = adapter.optimizer},
                  adapter.created_at);
  if (!status.ok()) {
    context_.dispatcher.adapters().ReturnSlot();
    return status;
  }
  dispatch::AdapterFacts facts = context_.adapters.Facts(adapter.key);
  facts.info.epoch = adapter.epoch;
  facts.info.durability = Durability::kStep;
  context_.dispatcher.adapters().Add(adapter.key, adapter.adapter_id,
                                     adapter.tenant, adapter.last_step, facts);
  return absl::OkStatus();
}

absl::Status AdapterManager::MakeTensors(AdapterKey key,
                                         const LoraConfig& config,
                                         const lora::AdapterState& state,
                                         absl::Time created_at) {
  const absl::Status status = context_.guard.Guarded("CreateAdapter", [&] {
    lora::Adapter& made = context_.adapters.Create(key, config, created_at);
    if (state.weights.empty()) {
      made.set_optimizer(state.optimizer);
    } else {
      made.SetState(state);
    }
  });
  if (!status.ok()) context_.adapters.Erase(key);
  return status;
}

void AdapterManager::Record(AdapterKey key, const NewAdapter& adapter,
                            const AdapterInfo& made) const {
  const CreateAdapterRequest& request = adapter.request;
  log::StoredAdapter record{.key = key,
                            .adapter_id = request.adapter_id,
                            .tenant = request.tenant,
                            .config = request.config,
                            .epoch = made.epoch,
                            .last_step = adapter.last_step,
                            .created_at = made.created_at,
                            .optimizer = made.optimizer};
  if (!adapter.image.empty()) {
    record.image =
        log::ImageRecord{.file = adapter.image,
                         .optim_steps = made.optim_steps,
                         .optimizer = made.optimizer,
                         .accumulated_tokens = made.accumulated_tokens,
                         .versions = {made.version}};
  }
  if (request.durability != Durability::kMemory) {
    context_.recorder.Write(record);
  }
}

absl::StatusOr<AdapterKey> AdapterManager::Find(
    const std::string& adapter_id) const {
  const dispatch::AdapterDesk& desk = context_.dispatcher.adapters();
  WEFT_RETURN_IF_ERROR(desk.CheckReady(adapter_id));
  const std::optional<AdapterKey> key = desk.KeyOf(adapter_id);
  if (!key) return NoSuchAdapter(adapter_id);
  return *key;
}

void AdapterManager::ReleaseSnapshot(ReleaseSnapshotRequest request,
                                     Callback<bool> done) {
  Post(done, [this, request = std::move(request), done] {
    const absl::StatusOr<AdapterKey> key = Find(request.adapter_id);
    if (!key.ok()) return context_.Reply(done, key.status());
    context_.before_change(*key);
    const absl::Status status =
        context_.adapters.ReleaseSnapshot(*key, request.name);
    if (status.ok()) {
      context_.Publish(*key);
      context_.recorder.Write(
          log::ReleaseRecord{.key = *key, .name = request.name});
    }
    context_.Reply(done, status.ok() ? absl::StatusOr<bool>(true) : status);
  });
}

void AdapterManager::Export(ExportAdapterRequest request,
                            Callback<PeftFiles> done) {
  Post(done, [this, request = std::move(request), done] {
    const absl::StatusOr<AdapterKey> key = Find(request.adapter_id);
    if (!key.ok()) return context_.Reply(done, key.status());
    context_.dispatcher.adapters().WhenOnDevice(
        *key, [this, key = *key, request, done](const absl::Status& room) {
          ExportNow(key, request, done, room);
        });
  });
}

void AdapterManager::ExportNow(AdapterKey key,
                               const ExportAdapterRequest& request,
                               const Callback<PeftFiles>& done,
                               absl::Status status) {
  std::vector<float> weights;
  if (status.ok()) {
    absl::StatusOr<lora::AdapterVersionPtr> version =
        context_.adapters.Version(key, request.snapshot);
    status = version.status();
    if (status.ok()) {
      status = context_.guard.Guarded(
          "ExportAdapter", [&] { weights = (*version)->HostWeights(); });
    }
  }
  if (!status.ok()) return context_.Reply(done, status);
  context_.PostIo(request.adapter_id,
                  [this, done, config = context_.adapters.Find(key)->config(),
                   weights = std::move(weights), loader = request.loader] {
                    context_.Reply(
                        done, context_.files.Export(config, weights, loader));
                  });
}

}  // namespace weft::engine
