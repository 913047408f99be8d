#include "src/engine/recovery/recovery.h"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/state_image.h"
#include "src/engine/recovery/restore_adapter.h"
#include "src/log/way_out.h"

namespace weft::engine {
namespace {

// Between two tries of what the store did not do.
constexpr absl::Duration kPause = absl::Seconds(1);

// Gives the log the names of its adapters that the directory lacks. One that
// leaves is not among them: without an entry it was deleted elsewhere.
void RestoreNames(const EngineContext& context,
                  const std::set<std::string>& names) {
  if (context.directory == nullptr) return;
  context.PostIo("", [&context, names] {
    const absl::Status restored = context.directory->Restore(names);
    if (restored.ok()) return;
    Log(LogLevel::kWarning, "the names of adapters could not be looked up",
        {{"reason", restored.message()}});
  });
}

absl::Status StatusOf(const absl::Status& status) { return status; }
template <typename T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace

absl::Status Recovery::Start(log::LogMetrics* metrics) {
  absl::Status status;
  absl::Notification opened;
  context_.dispatcher.Post([&, this](const absl::Status& open) {
    began_at_ = SteadyNow();
    std::vector<log::AcceptedRecord> accepted;
    absl::StatusOr<std::unique_ptr<log::LogReader>> reader =
        open.ok() ? Read(&accepted)
                  : absl::StatusOr<std::unique_ptr<log::LogReader>>(open);
    status = log::WithWayOut(reader.status(), context_.options);
    if (status.ok()) status = StartRecording(metrics);
    if (status.ok()) RestoreNames(context_, report_.log.names);
    const absl::Status started = status;
    opened.Notify();
    // From here on `status` and `opened` may be gone.
    if (!started.ok()) {
      Finish(started);
      return;
    }
    replay_.Start(*std::move(reader), std::move(accepted),
                  [this](const absl::Status& replayed) {
                    Finish(log::WithWayOut(replayed, context_.options));
                  });
  });
  opened.WaitForNotification();
  return status;
}

absl::Status Recovery::failure() const {
  return ended_.HasBeenNotified() ? status_ : absl::OkStatus();
}

template <typename Work>
auto Recovery::Repeat(const Work& work) const {
  for (;; absl::SleepFor(kPause)) {
    auto result = work();
    const absl::Status status = StatusOf(result);
    if (!IsStoreAway(context_, status) || !context_.state->failure().ok()) {
      return result;
    }
    Log(LogLevel::kWarning, "a start waits: the store does not answer",
        {{"reason", status.message()}});
    context_.guard.PingWhenDue();
  }
}

absl::StatusOr<std::unique_ptr<log::LogReader>> Recovery::Read(
    std::vector<log::AcceptedRecord>* accepted) {
  WEFT_ASSIGN_OR_RETURN(log::Snapshot snapshot,
                        Repeat([&] { return ReadSnapshot(*context_.state); }));
  WEFT_RETURN_IF_ERROR(
      Repeat([&] { return CheckImages(context_, snapshot.adapters); }));
  for (const log::StoredAdapter& adapter : snapshot.adapters) {
    AddFromImage(context_, adapter, &snapshots_);
    ++report_.adapters;
  }
  const log::LogReading reading = {.max_resident = static_cast<size_t>(
                                       context_.options.max_resident_adapters)};
  WEFT_ASSIGN_OR_RETURN(report_.log, Repeat([&] {
                          return ReadLog(*context_.state, snapshot, reading);
                        }));
  WEFT_ASSIGN_OR_RETURN(
      std::unique_ptr<log::LogReader> reader,
      Repeat([&] { return context_.state->OpenLog(snapshot.first_sequence); }));
  dispatch::RecoveryDesk& desk = context_.dispatcher.recovery();
  desk.Reserve(report_.log.next_key, report_.log.last_epoch,
               report_.log.next_work);
  std::map<std::string, std::string> tenants;
  for (const auto& [id, adapter] : report_.log.changed) {
    tenants.emplace(id, adapter.tenant);
  }
  desk.SetRecovering(std::move(tenants));
  for (const std::string& unit : report_.log.moving) {
    WEFT_RETURN_IF_ERROR(desk.Hold(unit, {}));
  }
  *accepted = std::move(snapshot.accepted);
  return reader;
}

absl::Status Recovery::StartRecording(log::LogMetrics* metrics) {
  log::LogSummary& log = report_.log;
  WEFT_ASSIGN_OR_RETURN(
      std::unique_ptr<log::LogWriter> writer,
      log::LogWriter::Open(context_.state, log.next_sequence,
                           {.disk_reserve_bytes = static_cast<uint64_t>(
                                context_.options.disk_reserve_bytes)},
                           metrics));
  // Moves the notes, so that the report does not keep those that are erased
  // later.
  const absl::Duration read_time = context_.state->ReadTime();
  context_.recorder.Start(
      std::move(writer),
      {.bytes = log.num_bytes,
       .time = read_time * static_cast<double>(log.num_records)},
      read_time, settings_, log.adapters, std::move(log.notes));
  for (const std::string& unit : log.moving) context_.recorder.HoldNotes(unit);
  context_.sample_records.Restore();
  for (const uint64_t work : log.given_up) {
    context_.recorder.Write(log::GivenUpRecord{.work = work});
  }
  return absl::OkStatus();
}

void Recovery::Finish(absl::Status status) {
  if (status.ok()) {
    context_.recorder.AddCost(report_.device_time);
    Log(LogLevel::kInfo, "state recovered",
        {{"adapters", report_.adapters},
         {"records", report_.log.num_records},
         {"mismatches", report_.mismatches},
         {"torn_bytes", report_.log.torn_bytes},
         {"seconds", absl::ToDoubleSeconds(SteadyNow() - began_at_)}});
  }
  status_ = std::move(status);
  ended_.Notify();
}

}  // namespace weft::engine
