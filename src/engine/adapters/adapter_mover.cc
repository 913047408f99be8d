#include "src/engine/adapters/adapter_mover.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/engine/adapters/state_image.h"

namespace weft::engine {

void AdapterMover::Run(const dispatch::Move& move) {
  using enum AdapterLocation;
  if (move.to == kDisk) {
    ToDisk(move);
  } else if (move.to == kHost || move.from == kHost) {
    InMemory(move);
  } else {
    FromDisk(move);
  }
}

void AdapterMover::InMemory(const dispatch::Move& move) {
  const bool out = move.to == AdapterLocation::kHost;
  AdapterTable& adapters = context_.adapters;
  const uint64_t bytes = adapters.ImageBytes(move.adapter);
  const absl::Status status = context_.guard.Guarded(
      out ? "moving an adapter out" : "moving an adapter in", [&] {
        lora::AdapterImage image = adapters.Image(move.adapter);
        out ? adapters.MoveToHost(move.adapter, std::move(image))
            : adapters.MoveToDevice(move.adapter, image);
      });
  Finish(move, bytes, status);
}

void AdapterMover::ToDisk(const dispatch::Move& move) {
  const uint64_t bytes = context_.adapters.ImageBytes(move.adapter);
  lora::AdapterImage image;
  const absl::Status copied = context_.guard.Guarded(
      "moving an adapter out",
      [&] { image = context_.adapters.Image(move.adapter); });
  if (!copied.ok()) return Finish(move, bytes, copied);
  // Until the file is written, the adapter keeps its tensors and nothing
  // changes them.
  context_.PostIo("", [this, move, bytes, image = std::move(image)]() mutable {
    const std::string file = absl::StrCat(move.id);
    const absl::Status status = spill_.Write(file, BlocksOf(image));
    context_.dispatcher.Post(
        [this, move, bytes, file, status,
         image = std::move(image)](const absl::Status& open) mutable {
          if (!open.ok()) return;
          if (!context_.dispatcher.adapters().IsUnderway(move)) {
            if (status.ok()) RemoveFile({.name = file});
            return;
          }
          if (status.ok()) {
            context_.adapters.MoveToDisk(move.adapter, std::move(image), file);
          }
          Finish(move, bytes, status);
        });
  });
}

void AdapterMover::FromDisk(const dispatch::Move& move) {
  const auto size = static_cast<int64_t>(
      context_.adapters.Facts(move.adapter).info.num_parameters);
  const ImageFile file = context_.adapters.File(move.adapter);
  if (file.durable) reading_[move.id] = move;
  context_.PostIo(
      file.checkpoint ? file.checkpoint->adapter_id : "",
      [this, move, size, bytes = context_.adapters.ImageBytes(move.adapter),
       file = file, image = context_.adapters.Image(move.adapter)]() mutable {
        absl::Status status = Read(file, size, image);
        context_.dispatcher.Post(
            [this, move, bytes, file, status = std::move(status),
             image = std::move(image)](const absl::Status& open) mutable {
              if (!open.ok()) return;
              reading_.erase(move.id);
              if (!context_.dispatcher.adapters().IsUnderway(move)) return;
              if (file.durable && IsStoreAway(context_, status)) {
                return Postpone(move, status);
              }
              if (status.ok()) {
                status = context_.guard.Guarded("moving an adapter in", [&] {
                  context_.adapters.MoveToDevice(move.adapter, image);
                });
              }
              if (status.ok()) RemoveFile(file);
              Finish(move, bytes, status);
            });
      });
}

void AdapterMover::Postpone(const dispatch::Move& move,
                            const absl::Status& status) {
  dispatch::AdapterDesk& desk = context_.dispatcher.adapters();
  Log(LogLevel::kWarning, "an adapter waits: the store does not answer",
      {{"adapter", desk.NameOf(move.adapter)}, {"reason", status.message()}});
  desk.PostponeMove(move);
  context_.when_store_answers([&desk, move](const absl::Status& open) {
    if (open.ok()) desk.ResumeMove(move.adapter);
  });
}

void AdapterMover::GoOn() {
  const bool has_state = context_.state != nullptr;
  if (reading_.empty() || !has_state || context_.state->answers()) return;
  for (const auto& [id, move] : std::exchange(reading_, {})) {
    if (!context_.dispatcher.adapters().IsUnderway(move)) continue;
    Postpone(move, absl::UnavailableError("the store does not answer"));
  }
}

absl::Status AdapterMover::Read(const ImageFile& file, int64_t size,
                                lora::AdapterImage& image) const {
  return ReadTensors(context_, spill_, file, size, image);
}

void AdapterMover::Finish(const dispatch::Move& move, uint64_t bytes,
                          const absl::Status& status) {
  if (status.ok()) {
    context_.Publish(move.adapter);
  } else {
    Log(LogLevel::kError, "an adapter could not be moved and stays",
        {{"adapter", context_.dispatcher.adapters().NameOf(move.adapter)},
         {"reason", status.message()}});
  }
  context_.dispatcher.adapters().FinishMove(move, bytes, status);
}

void AdapterMover::RemoveFile(ImageFile file) {
  if (file.name.empty() || file.durable) return;
  context_.PostIo("", [this, file = std::move(file)] {
    if (const absl::Status status = spill_.Remove(file.name); !status.ok()) {
      Log(LogLevel::kWarning, "a spill file stays",
          {{"reason", status.message()}});
    }
  });
}

}  // namespace weft::engine
