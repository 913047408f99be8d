#include "src/engine/moves/arrival.h"

#include <cerrno>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/state_image.h"
#include "src/engine/recovery/restore_adapter.h"

namespace weft::engine {
namespace {

// A look is one request to the store, and the move's callers wait for it.
constexpr absl::Duration kLookInterval = absl::Milliseconds(200);
// After a copy that failed, which may have been of much.
constexpr absl::Duration kCopyPause = absl::Seconds(1);

}  // namespace

void Arrival::Resume(log::ArrivingRecord record) {
  parts_.Open();
  resumed_.push_back(std::move(record));
}

void Arrival::GoOn(absl::Time now) {
  if (arriving_) return;
  if (!resumed_.empty()) {
    arriving_ = std::move(resumed_.front());
    resumed_.pop_front();
    return Take();
  }
  if (looking_ || now < next_look_) return;
  looking_ = true;
  parts_.OnIo(
      "", [this] { return Look(); },
      [this](
          const absl::StatusOr<std::optional<directory::FoundArrival>>& found) {
        looking_ = false;
        // Counts from the end of a look, so that a drain finds no task under
        // way at times, however slow the store is.
        next_look_ = SteadyNow() + kLookInterval;
        if (!found.ok() && found.status() != last_error_) {
          Log(LogLevel::kWarning, "cannot look for adapters of other logs",
              {{"reason", found.status().message()}});
        }
        last_error_ = found.status();
        if (found.ok() && *found) Consider(**found);
      });
}

absl::StatusOr<std::optional<directory::FoundArrival>> Arrival::Look() const {
  directory::Directory& directory = parts_.directory();
  const absl::StatusOr<directory::FoundArrival> found =
      directory.arrivals().Find(directory.own());
  if (absl::IsNotFound(found.status())) return std::nullopt;
  WEFT_RETURN_IF_ERROR(found.status());
  const absl::StatusOr<directory::Directory::Entry> entry =
      directory.Read(found->arrival.adapter_id);
  if (!entry.ok() && !absl::IsNotFound(entry.status())) return entry.status();
  if (entry.ok() && entry->version() == found->arrival.entry) {
    if (!found->arrival.refused.empty()) return std::nullopt;
    return *found;
  }
  // It has been decided whose the adapter is.
  WEFT_RETURN_IF_ERROR(directory.arrivals().Remove(*found));
  return std::nullopt;
}

void Arrival::Consider(const directory::FoundArrival& found) {
  const absl::StatusOr<log::Record> record =
      log::DecodeRecord(found.arrival.record);
  const auto* const adapter =
      record.ok() ? std::get_if<log::StoredAdapter>(&*record) : nullptr;
  if (adapter == nullptr || !adapter->image ||
      adapter->adapter_id != found.arrival.adapter_id) {
    return Refuse(found, absl::DataLossError("the message is damaged"));
  }
  const absl::Status fits = Check(*adapter);
  if (absl::IsUnavailable(fits)) return;
  if (!fits.ok()) return Refuse(found, fits);
  const EngineContext& context = parts_.context();
  const absl::Status held =
      context.dispatcher.recovery().Hold(adapter->adapter_id, adapter->tenant);
  if (!held.ok()) return;
  parts_.Open();
  arriving_ = {.adapter = *adapter,
               .from = found.arrival.from,
               .entry = found.arrival.entry};
  arriving_->adapter.key = context.dispatcher.adapters().NewKey();
  arriving_->adapter.image->file = context.state->NewImageName();
  // The cut of a snapshot that runs must not remove it.
  context.recorder.AddImage(arriving_->adapter.image->file, /*recorded=*/false);
  CopyImage(found, adapter->image->file);
}

absl::Status Arrival::Check(const log::StoredAdapter& adapter) const {
  dispatch::Dispatcher& dispatcher = parts_.context().dispatcher;
  const dispatch::AdapterDesk& desk = dispatcher.adapters();
  // On its way from here, or held for another reason: this may end.
  WEFT_RETURN_IF_ERROR(desk.CheckReady(adapter.adapter_id));
  if (!dispatcher.CheckOpen().ok() || parts_.manager().sends_elsewhere()) {
    return absl::FailedPreconditionError("its server is draining");
  }
  WEFT_RETURN_IF_ERROR(desk.CheckNew(adapter.adapter_id, adapter.tenant));
  return parts_.manager().CheckRanks(adapter.config);
}

void Arrival::Refuse(const directory::FoundArrival& found,
                     const absl::Status& reason) {
  parts_.Count(MoveMetrics::kRefused);
  Log(LogLevel::kWarning, "an adapter of another log is refused",
      {{"adapter", found.arrival.adapter_id},
       {"log", found.arrival.from},
       {"reason", reason.message()}});
  looking_ = true;
  parts_.OnIo(
      "",
      [this, found, text = std::string(reason.message())] {
        return parts_.directory().arrivals().Refuse(found, text);
      },
      // If it fails, the next look finds the message again.
      [this](const absl::Status& /*refused*/) { looking_ = false; });
}

void Arrival::CopyImage(const directory::FoundArrival& found,
                        const std::string& image) {
  parts_.OnIo(
      "",
      [this, image, arriving = *arriving_]() -> absl::Status {
        if (Failpoint("moves.copy")) return ErrnoStatus(errno, "copying");
        WEFT_RETURN_IF_ERROR(parts_.context().state->CopyImage(
            arriving.from, image, arriving.adapter.image->file));
        return CheckImages(parts_.context(), {arriving.adapter});
      },
      [this, found](const absl::Status& copied) {
        if (copied.ok()) return Record();
        // Whatever it is: the next look begins anew, until the sender's
        // patience ends.
        Log(LogLevel::kWarning, "an adapter of another log cannot be copied",
            {{"adapter", found.arrival.adapter_id},
             {"reason", copied.message()}});
        DropState(parts_.context(), arriving_->adapter.image->file);
        End();
        next_look_ = SteadyNow() + kCopyPause;
        if (absl::IsDataLoss(copied)) Refuse(found, copied);
      });
}

void Arrival::Record() {
  parts_.context().recorder.Write(*arriving_);
  parts_.WhenDurable([this] { Take(); });
}

void Arrival::Take() {
  parts_.OnIo(
      arriving_->adapter.adapter_id,
      [this, id = arriving_->adapter.adapter_id,
       entry = arriving_->entry]() -> absl::StatusOr<bool> {
        if (Failpoint("moves.take")) return ErrnoStatus(errno, "taking");
        WEFT_ASSIGN_OR_RETURN(const bool taken,
                              parts_.directory().Take(id, entry));
        if (Failpoint("moves.taken")) return ErrnoStatus(errno, "having taken");
        return taken;
      },
      [this](const absl::StatusOr<bool>& taken) {
        if (!taken.ok()) {
          return parts_.Again(arriving_->adapter.adapter_id, taken.status(),
                              [this] { Take(); });
        }
        *taken ? Own() : Drop();
      });
}

void Arrival::Own() {
  const EngineContext& context = parts_.context();
  const log::StoredAdapter& adapter = arriving_->adapter;
  parts_.Count(MoveMetrics::kArrived);
  context.recorder.Write(
      log::MoveRecord{.key = adapter.key, .stage = log::MoveStage::kOwn});
  // A later adapter with this name must have another epoch.
  context.dispatcher.recovery().Reserve(/*next_key=*/0, adapter.epoch,
                                        /*next_work=*/0);
  AddFromImage(context, adapter, &parts_.snapshots());
  Log(LogLevel::kInfo, "an adapter has arrived",
      {{"adapter", adapter.adapter_id}, {"log", arriving_->from}});
  End();
}

void Arrival::Drop() {
  const EngineContext& context = parts_.context();
  parts_.Count(MoveMetrics::kDropped);
  context.recorder.Write(log::MoveRecord{.key = arriving_->adapter.key,
                                         .stage = log::MoveStage::kDropped});
  DropState(context, arriving_->adapter.image->file);
  Log(LogLevel::kWarning, "an adapter that was to arrive has stayed",
      {{"adapter", arriving_->adapter.adapter_id}, {"log", arriving_->from}});
  End();
}

// The next look removes the message.
void Arrival::End() {
  const log::ArrivingRecord ended = *std::exchange(arriving_, std::nullopt);
  parts_.context().dispatcher.recovery().SetReady(ended.adapter.adapter_id);
  parts_.Close();
  next_look_ = absl::InfinitePast();
}

}  // namespace weft::engine
