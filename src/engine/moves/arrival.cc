#include "src/engine/moves/arrival.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/state_image.h"
#include "src/engine/recovery/restore_adapter.h"
#include "src/request/move_unit.h"

namespace weft::engine {
namespace {

// A look is one request to the store, and the move's callers wait for it.
constexpr absl::Duration kLookInterval = absl::Milliseconds(200);
// After a copy that failed, which may have been of much.
constexpr absl::Duration kCopyPause = absl::Seconds(1);

// Returns whether a record that another log has sent is this unit's.
bool IsWhole(const log::ArrivingRecord& sent, const std::string& unit) {
  return sent.unit == unit &&
         std::ranges::all_of(sent.adapters, [&unit](const auto& adapter) {
           return adapter.image && UnitOf(adapter.adapter_id) == unit;
         });
}

std::map<std::string, std::string> TenantsOf(const log::ArrivingRecord& sent) {
  std::map<std::string, std::string> tenants;
  for (const log::StoredAdapter& adapter : sent.adapters) {
    tenants.emplace(adapter.adapter_id, adapter.tenant);
  }
  return tenants;
}

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
      directory.Read(found->arrival.unit);
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
  const auto* const sent =
      record.ok() ? std::get_if<log::ArrivingRecord>(&*record) : nullptr;
  if (sent == nullptr || !IsWhole(*sent, found.arrival.unit)) {
    return Refuse(found, absl::DataLossError("the message is damaged"));
  }
  const absl::Status fits = Check(*sent);
  if (absl::IsUnavailable(fits)) return;
  if (!fits.ok()) return Refuse(found, fits);
  if (!parts_.Hold(sent->unit, TenantsOf(*sent)).ok()) return;
  parts_.Open();
  const EngineContext& context = parts_.context();
  arriving_ = *sent;
  arriving_->from = found.arrival.from;
  arriving_->entry = found.arrival.entry;
  std::vector<std::string> images;
  for (log::StoredAdapter& adapter : arriving_->adapters) {
    images.push_back(adapter.image->file);
    adapter.key = context.dispatcher.adapters().NewKey();
    adapter.image->file = context.state->NewImageName();
    // The cut of a snapshot that runs must not remove it.
    context.recorder.AddImage(adapter.image->file, /*recorded=*/false);
  }
  CopyImages(found, images);
}

absl::Status Arrival::Check(const log::ArrivingRecord& sent) const {
  dispatch::Dispatcher& dispatcher = parts_.context().dispatcher;
  const dispatch::AdapterDesk& desk = dispatcher.adapters();
  // On its way from here, or held for another reason: this may end.
  WEFT_RETURN_IF_ERROR(desk.CheckReady(sent.unit));
  if (!dispatcher.CheckOpen().ok() || parts_.manager().sends_elsewhere()) {
    return absl::FailedPreconditionError("its server is draining");
  }
  WEFT_RETURN_IF_ERROR(desk.CheckNew(TenantsOf(sent)));
  for (const log::StoredAdapter& adapter : sent.adapters) {
    WEFT_RETURN_IF_ERROR(parts_.manager().CheckRanks(adapter.config));
  }
  return absl::OkStatus();
}

void Arrival::Refuse(const directory::FoundArrival& found,
                     const absl::Status& reason) {
  parts_.Count(MoveMetrics::kRefused);
  Log(LogLevel::kWarning, "an adapter of another log is refused",
      {{"adapter", found.arrival.unit},
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

void Arrival::CopyImages(const directory::FoundArrival& found,
                         const std::vector<std::string>& images) {
  parts_.OnIo(
      "",
      [this, images, arriving = *arriving_]() -> absl::Status {
        if (Failpoint("moves.copy")) return ErrnoStatus(errno, "copying");
        for (size_t i = 0; i < images.size(); ++i) {
          WEFT_RETURN_IF_ERROR(parts_.context().state->CopyImage(
              arriving.from, images[i], arriving.adapters[i].image->file));
        }
        return CheckImages(parts_.context(), arriving.adapters);
      },
      [this, found](const absl::Status& copied) {
        if (copied.ok()) return Record();
        // Whatever it is: the next look begins anew, until the sender's
        // patience ends.
        Log(LogLevel::kWarning, "an adapter of another log cannot be copied",
            {{"adapter", found.arrival.unit}, {"reason", copied.message()}});
        DropImages();
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
      arriving_->unit,
      [this, unit = arriving_->unit,
       entry = arriving_->entry]() -> absl::StatusOr<bool> {
        if (Failpoint("moves.take")) return ErrnoStatus(errno, "taking");
        WEFT_ASSIGN_OR_RETURN(const bool taken,
                              parts_.directory().Take(unit, entry));
        if (Failpoint("moves.taken")) return ErrnoStatus(errno, "having taken");
        return taken;
      },
      [this](const absl::StatusOr<bool>& taken) {
        if (!taken.ok()) {
          return parts_.Again(arriving_->unit, taken.status(),
                              [this] { Take(); });
        }
        *taken ? Own() : Drop();
      });
}

void Arrival::Own() {
  const EngineContext& context = parts_.context();
  parts_.Count(MoveMetrics::kArrived);
  parts_.directory().memory().Forget(arriving_->unit);
  context.recorder.Own(*arriving_);
  for (const log::StoredAdapter& adapter : arriving_->adapters) {
    // A later adapter with this name must have another epoch.
    context.dispatcher.recovery().Reserve(/*next_key=*/0, adapter.epoch,
                                          /*next_work=*/0);
    AddFromImage(context, adapter, &parts_.snapshots());
  }
  Log(LogLevel::kInfo, "an adapter has arrived",
      {{"adapter", arriving_->unit},
       {"models", arriving_->adapters.size()},
       {"log", arriving_->from}});
  End();
}

void Arrival::Drop() {
  parts_.Count(MoveMetrics::kDropped);
  parts_.context().recorder.Write(log::MoveRecord{
      .unit = arriving_->unit, .stage = log::MoveStage::kDropped});
  DropImages();
  Log(LogLevel::kWarning, "an adapter that was to arrive has stayed",
      {{"adapter", arriving_->unit}, {"log", arriving_->from}});
  End();
}

void Arrival::DropImages() const {
  for (const log::StoredAdapter& adapter : arriving_->adapters) {
    DropState(parts_.context(), adapter.image->file);
  }
}

// The next look removes the message.
void Arrival::End() {
  const log::ArrivingRecord ended = *std::exchange(arriving_, std::nullopt);
  parts_.Release(ended.unit);
  parts_.Close();
  next_look_ = absl::InfinitePast();
}

}  // namespace weft::engine
