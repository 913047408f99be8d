// Operations on adapters as a whole: create, delete, move in and out. They run
// on the engine thread between two plans; files are the I/O thread's.
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/log.h"
#include "src/engine/engine_impl.h"
#include "src/lora/peft_format.h"

namespace weft::engine {

template <typename Result>
bool EngineImpl::Admit(const Callback<Result>& done) {
  absl::Status open;
  {
    MutexLock lock(&mu_);
    open = CheckOpen();
  }
  if (!open.ok()) done(open);
  return open.ok();
}

void EngineImpl::PostIo(std::function<void()> task) {
  {
    MutexLock lock(&mu_);
    ++pending_io_;
  }
  io_.Post([this, task = std::move(task)] {
    task();
    MutexLock lock(&mu_);
    --pending_io_;
  });
}

void EngineImpl::CreateAdapter(CreateAdapterRequest request,
                               Callback<AdapterInfo> done) {
  if (!Admit(done)) return;
  PostControl([this, request = std::move(request), done = std::move(done)] {
    CreateWhenRoom(request, /*state=*/std::nullopt, /*last_step=*/0,
                   [this, request, done](absl::StatusOr<AdapterInfo> info) {
                     if (absl::IsAlreadyExists(info.status())) {
                       // A repeated call is answered as the first one was.
                       const absl::StatusOr<AdapterInfo> existing =
                           adapters_.Info(request.adapter_id);
                       if (existing.ok() &&
                           existing->tenant == request.tenant &&
                           existing->config == request.config &&
                           existing->last_step == 0 && existing->version == 1) {
                         info = existing;
                       }
                     }
                     done(std::move(info));
                   });
  });
}

void EngineImpl::DeleteAdapter(std::string adapter_id, Callback<bool> done) {
  if (!Admit(done)) return;
  PostControl(
      [this, adapter_id = std::move(adapter_id), done = std::move(done)] {
        const bool existed = Forget(adapter_id);
        ShowAdapters();
        if (existed) {
          Log(LogLevel::kInfo, "adapter deleted", {{"adapter", adapter_id}});
        }
        completions_.Post([done, adapter_id, existed] {
          if (existed) {
            done(true);
          } else {
            done(NoSuchAdapter(adapter_id));
          }
        });
      });
}

bool EngineImpl::Forget(const std::string& adapter_id) {
  std::string file;
  if (adapters_.Info(adapter_id).ok()) file = adapters_.File(adapter_id);
  const bool existed = adapters_.Erase(adapter_id);
  const absl::Status gone = absl::NotFoundError(
      absl::StrCat("adapter_id: '", adapter_id, "' was deleted"));
  std::vector<RoomTask> tasks;
  {
    MutexLock lock(&mu_);
    residency_.Remove(adapter_id);
    wanted_at_.erase(adapter_id);
    tasks = TakeTasks(adapter_id);
    for (const uint64_t id : scheduler_.RemoveAdapter(adapter_id)) {
      progress_.erase(id);
      if (samples_.contains(id)) {
        DropSample(id, gone);
      } else {
        DropStep(id, gone);
      }
    }
    replays_.erase(adapter_id);
    // What is on the I/O thread must not touch a new adapter of that name.
    for (auto& [id, work] : steps_) {
      if (work->adapter_id == adapter_id) work->orphaned = true;
    }
  }
  if (!file.empty()) RemoveSpillFile(std::move(file));
  for (const RoomTask& task : tasks) task(gone);
  return existed;
}

int EngineImpl::MaxRank(const LoraConfig& config) const {
  return lora::AdapterLayout(adapters_.shape(), config).max_rank();
}

void EngineImpl::LoadNewAdapter(LoadCheckpointRequest request,
                                Callback<StepReply<AdapterInfo>> done) {
  if (!Admit(done)) return;
  Callback<AdapterInfo> reply = [done](absl::StatusOr<AdapterInfo> info) {
    if (!info.ok()) {
      done(info.status());
    } else {
      done(StepReply<AdapterInfo>{.result = *info});
    }
  };
  PostIo([this, request = std::move(request), reply = std::move(reply)] {
    const absl::StatusOr<CheckpointInfo> info =
        adapter_io_.Describe(request.source_adapter_id, request.name);
    if (!info.ok()) {
      reply(info.status());
      return;
    }
    PostControl([this, request, reply, config = info->config] {
      const int rank = MaxRank(config);
      if (rank > parts_.options.max_rank) {
        completions_.Post([reply, rank, name = request.name,
                           limit = parts_.options.max_rank] {
          reply(absl::FailedPreconditionError(
              absl::StrCat("name: checkpoint '", name, "' has rank ", rank,
                           ", the limit is ", limit, " (--max-rank)")));
        });
        return;
      }
      LoadWhenRoom(request, reply);
    });
  });
}

void EngineImpl::LoadWhenRoom(const LoadCheckpointRequest& request,
                              const Callback<AdapterInfo>& done) {
  // The tensors are read when there is a slot for them: many may wait.
  WhenSlot({.adapter_id = request.adapter_id, .tenant = request.tenant},
           [this, request, done](const absl::Status& room) {
             if (!room.ok()) {
               completions_.Post([done, room] { done(room); });
               return;
             }
             PostIo([this, request, done] {
               absl::StatusOr<LoadedCheckpoint> loaded =
                   adapter_io_.Load(request.source_adapter_id, request.name);
               PostControl(
                   [this, request, done, loaded = std::move(loaded)]() mutable {
                     FinishLoad(request, std::move(loaded), done);
                   });
             });
           });
}

void EngineImpl::FinishLoad(const LoadCheckpointRequest& request,
                            absl::StatusOr<LoadedCheckpoint> loaded,
                            const Callback<AdapterInfo>& done) {
  if (!loaded.ok()) {
    {
      MutexLock lock(&mu_);
      residency_.ReturnSlot();
    }
    completions_.Post([done, status = loaded.status()] { done(status); });
    return;
  }
  if (request.weights_only) {
    loaded->state = {.weights = std::move(loaded->state.weights)};
  }
  const absl::StatusOr<AdapterInfo> info =
      Create({.adapter_id = request.adapter_id,
              .tenant = request.tenant,
              .config = loaded->info.config},
             &loaded->state, request.weights_only ? 0 : loaded->info.last_step);
  completions_.Post([done, info] { done(info); });
}

void EngineImpl::ListCheckpoints(std::string adapter_id,
                                 Callback<std::vector<CheckpointInfo>> done) {
  PostIo([this, adapter_id = std::move(adapter_id), done = std::move(done)] {
    done(adapter_io_.List(adapter_id));
  });
}

void EngineImpl::DeleteCheckpoint(std::string adapter_id, std::string name,
                                  Callback<bool> done) {
  if (!Admit(done)) return;
  PostIo([this, adapter_id = std::move(adapter_id), name = std::move(name),
          done = std::move(done)] {
    const absl::Status status = adapter_io_.Delete(adapter_id, name);
    if (status.ok()) {
      done(true);
    } else {
      done(status);
    }
  });
}

void EngineImpl::ReleaseSnapshot(ReleaseSnapshotRequest request,
                                 Callback<bool> done) {
  if (!Admit(done)) return;
  PostControl([this, request = std::move(request), done = std::move(done)] {
    const absl::Status status =
        adapters_.ReleaseSnapshot(request.adapter_id, request.name);
    completions_.Post([done, status] {
      if (status.ok()) {
        done(true);
      } else {
        done(status);
      }
    });
  });
}

void EngineImpl::ExportAdapter(ExportAdapterRequest request,
                               Callback<PeftFiles> done) {
  if (!Admit(done)) return;
  PostControl([this, request = std::move(request), done = std::move(done)] {
    WhenOnDevice(request.adapter_id,
                 [this, request, done](const absl::Status& room) {
                   ExportNow(request, done, room);
                 });
  });
}

void EngineImpl::ExportNow(const ExportAdapterRequest& request,
                           const Callback<PeftFiles>& done,
                           absl::Status status) {
  std::vector<float> weights;
  if (status.ok()) {
    absl::StatusOr<lora::AdapterVersionPtr> version =
        adapters_.Version(request.adapter_id, request.snapshot);
    status = version.status();
    if (status.ok()) {
      status = Guarded("ExportAdapter",
                       [&] { weights = (*version)->HostWeights(); });
    }
  }
  if (!status.ok()) {
    completions_.Post([done, status] { done(status); });
    return;
  }
  const LoraConfig config = adapters_.Find(request.adapter_id)->config();
  PostIo([this, done, config, weights = std::move(weights)] {
    done(adapter_io_.Export(config, weights));
  });
}

void EngineImpl::ImportAdapter(ImportAdapterRequest request,
                               Callback<AdapterInfo> done) {
  if (!Admit(done)) return;
  PostIo([this, request = std::move(request), done = std::move(done)] {
    absl::StatusOr<lora::PeftAdapter> peft =
        lora::ReadPeft(request.files, adapters_.shape());
    const int rank = peft.ok() ? MaxRank(peft->config) : 0;
    if (rank > parts_.options.max_rank) {
      peft = absl::InvalidArgumentError(absl::StrCat(
          "adapter_config.json: rank ", rank, " is above the limit ",
          parts_.options.max_rank, " (--max-rank)"));
    }
    if (!peft.ok()) {
      done(peft.status());
      return;
    }
    PostControl([this, adapter_id = request.adapter_id, tenant = request.tenant,
                 done, peft = *std::move(peft)]() mutable {
      CreateWhenRoom(
          {.adapter_id = adapter_id, .tenant = tenant, .config = peft.config},
          lora::AdapterState{.weights = std::move(peft.weights)},
          /*last_step=*/0, done);
    });
  });
}

}  // namespace weft::engine
