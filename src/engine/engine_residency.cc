// Adapters move between device, host and disk: what the policy decides
// (src/sched/residency.h) is done here, files by the I/O thread.
#include <ATen/ATen.h>

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/log.h"
#include "src/engine/engine_impl.h"
#include "src/engine/torch_guard.h"

namespace weft::engine {
namespace {

// For clients: why work did not run. A full disk or device may have room later;
// the rest is the server's trouble.
absl::Status MoveFailed(const sched::Move& move, const absl::Status& status) {
  const std::string text =
      move.to == AdapterLocation::kDevice
          ? absl::StrCat("adapter_id: '", move.adapter,
                         "' could not be moved in: ", status.message())
          : absl::StrCat("no room on the device: adapter '", move.adapter,
                         "' could not be moved out: ", status.message());
  const bool known =
      absl::IsResourceExhausted(status) || absl::IsUnavailable(status);
  return {known ? status.code() : absl::StatusCode::kInternal, text};
}

// Makes the image's tensors, of `size` floats each, and reads them.
absl::Status ReadImage(const SpillFolder& spill, const std::string& file,
                       int64_t size, lora::AdapterImage& image) {
  std::vector<std::span<float>> blocks;
  const absl::Status status = RunGuarded("reading an adapter back", [&] {
    const at::InferenceMode no_autograd;
    for (at::Tensor* tensor : image.Tensors()) {
      *tensor = at::empty({size}, at::kFloat);
      blocks.emplace_back(tensor->mutable_data_ptr<float>(), size);
    }
  });
  return status.ok() ? spill.Read(file, blocks) : status;
}

absl::Status WriteImage(const SpillFolder& spill, const std::string& file,
                        lora::AdapterImage& image) {
  std::vector<std::span<const float>> blocks;
  for (const at::Tensor* tensor : image.Tensors()) {
    blocks.emplace_back(tensor->const_data_ptr<float>(), tensor->numel());
  }
  return spill.Write(file, blocks);
}

}  // namespace

void EngineImpl::WantAdapter(const std::string& adapter_id) {
  if (residency_.Want(adapter_id)) {
    wanted_at_.insert_or_assign(adapter_id, absl::Now());
  }
}

sched::Demand EngineImpl::DemandOf(const std::string& adapter_id) const {
  return {.busy = scheduler_.IsRunning(adapter_id),
          .ready = static_cast<sched::WorkKinds>(
              scheduler_.ReadyKinds(adapter_id) |
              (adapter_tasks_.contains(adapter_id) ? sched::kTask : 0))};
}

std::optional<sched::Move> EngineImpl::NextMove() {
  std::optional<sched::Move> move = residency_.Next(
      [this](const std::string& adapter_id) { return DemandOf(adapter_id); },
      [this](const std::string& adapter_id) {
        return adapters_.ImageBytes(adapter_id);
      });
  if (move && move->ticket == 0 && move->from == AdapterLocation::kDevice) {
    scheduler_.SetHeld(move->adapter, true);
    // When it has work it waits again from now on.
    wanted_at_.insert_or_assign(move->adapter, absl::Now());
  }
  return move;
}

void EngineImpl::WhenOnDevice(const std::string& adapter_id, RoomTask task) {
  {
    MutexLock lock(&mu_);
    if (residency_.LocationOf(adapter_id) && !residency_.CanRun(adapter_id)) {
      adapter_tasks_[adapter_id].push_back(std::move(task));
      WantAdapter(adapter_id);
      return;
    }
    residency_.Used(adapter_id, sched::kTask);
  }
  task(absl::OkStatus());
}

void EngineImpl::RunMove(const sched::Move& move) {
  using enum AdapterLocation;
  if (move.ticket > 0) {
    RoomTask task;
    {
      MutexLock lock(&mu_);
      task = std::move(slot_tasks_.extract(move.ticket).mapped());
    }
    task(absl::OkStatus());
  } else if (move.to == kHost) {
    MoveToHost(move);
  } else if (move.to == kDisk) {
    MoveToDisk(move);
  } else if (move.from == kHost) {
    MoveFromHost(move);
  } else {
    MoveFromDisk(move);
  }
}

void EngineImpl::MoveToHost(const sched::Move& move) {
  const uint64_t bytes = adapters_.ImageBytes(move.adapter);
  const absl::Status status = Guarded("moving an adapter out", [&] {
    adapters_.MoveToHost(move.adapter, adapters_.Image(move.adapter));
  });
  FinishMove(move, bytes, status);
}

void EngineImpl::MoveToDisk(const sched::Move& move) {
  const uint64_t bytes = adapters_.ImageBytes(move.adapter);
  lora::AdapterImage image;
  const absl::Status copied = Guarded(
      "moving an adapter out", [&] { image = adapters_.Image(move.adapter); });
  if (!copied.ok()) {
    FinishMove(move, bytes, copied);
    return;
  }
  // Until the file is there the adapter keeps its tensors, which nobody
  // changes.
  PostIo([this, move, bytes, image = std::move(image)]() mutable {
    const std::string file = absl::StrCat(move.id);
    const absl::Status status = WriteImage(*parts_.spill, file, image);
    PostControl(
        [this, move, bytes, file, status, image = std::move(image)]() mutable {
          bool underway = false;
          {
            MutexLock lock(&mu_);
            underway = residency_.IsUnderway(move);
          }
          if (!underway) {
            if (status.ok()) RemoveSpillFile(file);
            return;
          }
          if (status.ok()) {
            adapters_.MoveToDisk(move.adapter, std::move(image), file);
          }
          FinishMove(move, bytes, status);
        });
  });
}

void EngineImpl::MoveFromHost(const sched::Move& move) {
  const uint64_t bytes = adapters_.ImageBytes(move.adapter);
  const absl::Status status = Guarded("moving an adapter in", [&] {
    adapters_.MoveToDevice(move.adapter, adapters_.Image(move.adapter));
  });
  FinishMove(move, bytes, status);
}

void EngineImpl::MoveFromDisk(const sched::Move& move) {
  const auto size =
      static_cast<int64_t>(adapters_.Info(move.adapter)->num_parameters);
  PostIo([this, move, size, bytes = adapters_.ImageBytes(move.adapter),
          file = adapters_.File(move.adapter),
          image = adapters_.Image(move.adapter)]() mutable {
    absl::Status status = ReadImage(*parts_.spill, file, size, image);
    PostControl([this, move, bytes, file, status = std::move(status),
                 image = std::move(image)]() mutable {
      {
        MutexLock lock(&mu_);
        if (!residency_.IsUnderway(move)) return;
      }
      if (status.ok()) {
        status = Guarded("moving an adapter in",
                         [&] { adapters_.MoveToDevice(move.adapter, image); });
      }
      if (status.ok()) RemoveSpillFile(file);
      FinishMove(move, bytes, status);
    });
  });
}

void EngineImpl::FinishMove(const sched::Move& move, uint64_t bytes,
                            const absl::Status& status) {
  std::vector<RoomTask> ready;
  std::vector<RoomTask> failed;
  absl::Status error;
  {
    MutexLock lock(&mu_);
    const std::optional<sched::SlotWaiter> unserved =
        residency_.Finished(move, status.ok());
    if (unserved) {
      error = MoveFailed(move, status);
      failed = DropWaiter(*unserved, error);
    }
    if (residency_.CanRun(move.adapter)) {
      scheduler_.SetHeld(move.adapter, false);
      ready = TakeTasks(move.adapter);
      if (status.ok()) {
        probe_.ObserveSwapIn(absl::Now() - wanted_at_.at(move.adapter));
      }
      wanted_at_.erase(move.adapter);
    }
  }
  probe_.CountMove(move.from, move.to, status.ok(), bytes);
  if (!status.ok()) {
    Log(LogLevel::kError, "an adapter could not be moved and stays",
        {{"adapter", move.adapter}, {"reason", status.message()}});
  }
  ShowAdapters();
  for (const RoomTask& task : failed) task(error);
  for (const RoomTask& task : ready) task(absl::OkStatus());
}

std::vector<EngineImpl::RoomTask> EngineImpl::DropWaiter(
    const sched::SlotWaiter& waiter, const absl::Status& status) {
  if (waiter.ticket > 0) {
    return {std::move(slot_tasks_.extract(waiter.ticket).mapped())};
  }
  for (const uint64_t id : scheduler_.CancelWaiting(waiter.adapter)) {
    if (samples_.contains(id)) {
      DropSample(id, status);
    } else {
      DropStep(id, status);
    }
  }
  return TakeTasks(waiter.adapter);
}

std::vector<EngineImpl::RoomTask> EngineImpl::TakeTasks(
    const std::string& adapter_id) {
  const auto it = adapter_tasks_.find(adapter_id);
  if (it == adapter_tasks_.end()) return {};
  std::vector<RoomTask> tasks = std::move(it->second);
  adapter_tasks_.erase(it);
  return tasks;
}

void EngineImpl::RemoveSpillFile(std::string file) {
  PostIo([this, file = std::move(file)] {
    if (const absl::Status status = parts_.spill->Remove(file); !status.ok()) {
      Log(LogLevel::kWarning, "a spill file stays",
          {{"reason", status.message()}});
    }
  });
}

void EngineImpl::ShowAdapters() {
  MutexLock lock(&mu_);
  probe_.SetAdapters(residency_.Counts(), adapters_.resident_bytes());
}

void EngineImpl::WhenSlot(const CreateAdapterRequest& request, RoomTask task) {
  // Nobody has to leave for one that cannot be made.
  if (const absl::Status status =
          adapters_.CheckNew(request.adapter_id, request.tenant);
      !status.ok()) {
    task(status);
    return;
  }
  MutexLock lock(&mu_);
  const uint64_t ticket = next_id_++;
  slot_tasks_.emplace(ticket, std::move(task));
  residency_.WantSlot(ticket);
}

void EngineImpl::CreateWhenRoom(CreateAdapterRequest request,
                                std::optional<lora::AdapterState> state,
                                uint64_t last_step,
                                Callback<AdapterInfo> done) {
  WhenSlot(request, [this, request, state = std::move(state), last_step,
                     done = std::move(done)](const absl::Status& room) {
    const absl::StatusOr<AdapterInfo> info =
        room.ok() ? Create(request, state ? &*state : nullptr, last_step)
                  : room;
    completions_.Post([done, info] { done(info); });
  });
}

absl::StatusOr<AdapterInfo> EngineImpl::Create(
    const CreateAdapterRequest& request, const lora::AdapterState* state,
    uint64_t last_step) {
  const std::string& adapter_id = request.adapter_id;
  absl::StatusOr<lora::Adapter*> adapter = absl::InternalError("not run");
  absl::Status status = Guarded("CreateAdapter", [&] {
    adapter = adapters_.Create(adapter_id, request.tenant, request.config);
    if (adapter.ok() && state != nullptr) (*adapter)->SetState(*state);
  });
  if (!status.ok()) {
    adapters_.Erase(adapter_id);
  } else {
    status = adapter.status();
  }
  {
    MutexLock lock(&mu_);
    if (!status.ok()) {
      residency_.ReturnSlot();
      return status;
    }
    residency_.Add(adapter_id);
    scheduler_.AddAdapter(adapter_id, request.tenant, last_step);
    replays_.insert_or_assign(adapter_id, ReplayTable());
  }
  adapters_.Publish(adapter_id, last_step);
  ShowAdapters();
  Log(LogLevel::kInfo, "adapter created",
      {{"adapter", adapter_id},
       {"tenant", request.tenant},
       {"rank", request.config.rank}});
  return adapters_.Info(adapter_id);
}

}  // namespace weft::engine
