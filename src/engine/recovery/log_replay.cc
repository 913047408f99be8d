#include "src/engine/recovery/log_replay.h"

#include <algorithm>
#include <cerrno>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "src/base/clock.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"
#include "src/engine/adapters/state_image.h"
#include "src/request/move_unit.h"

namespace weft::engine {
namespace {

// A turn waits so long for a record from a store.
constexpr absl::Duration kPatience = absl::Milliseconds(1);

}  // namespace

void LogReplay::Start(std::unique_ptr<log::LogReader> reader,
                      std::vector<log::AcceptedRecord> accepted,
                      std::function<void(const absl::Status&)> done) {
  done_ = std::move(done);
  reader_ = std::move(reader);
  for (log::AcceptedRecord& step : accepted) {
    accepted_.emplace(step.work, std::move(step));
  }
  for (const auto& [id, adapter] : report_.log.changed) {
    last_records_.emplace(adapter.last, id);
  }
  EndRecord(0);  // The log has no record of these adapters, only the snapshot.
  progress_ = std::make_unique<Progress>(
      "running the log again", static_cast<int64_t>(reader_->total_bytes()),
      "B");
  Advance();
}

void LogReplay::Advance() {
  if (in_turn_) {
    advances_ = true;
    return;
  }
  context_.dispatcher.recovery().Post([this](const absl::Status& open) {
    if (open.ok()) {
      RunTurn();
    } else {
      Finish(open);
    }
  });
}

void LogReplay::RunTurn() {
  const log::Recorder::Replaying replaying(&context_.recorder);
  used_device_ = false;
  in_turn_ = true;
  do {
    advances_ = false;
    ReadRecord();
  } while (advances_ && !used_device_);
  in_turn_ = false;
  if (advances_) Advance();
}

void LogReplay::Pass(const absl::Status& status,
                     const std::function<void()>& again, const Next& next) {
  if (!IsStoreAway(context_, status)) return next(status);
  Log(LogLevel::kWarning,
      "the replay of the log waits: the store does not answer",
      {{"reason", status.message()}});
  context_.when_store_answers([again, next](const absl::Status& open) {
    open.ok() ? again() : next(open);
  });
}

void LogReplay::ReadRecord() {
  // Later records were written by this process and are not replayed.
  if (reader_->next_sequence() >= report_.log.next_sequence) {
    Finish(absl::OkStatus());
    return;
  }
  if (Failpoint("recovery.replay")) {
    Finish(ErrnoStatus(errno, "replaying the log"));
    return;
  }
  // Others work meanwhile.
  if (!reader_->IsReady(kPatience)) {
    used_device_ = true;
    advances_ = true;
    return;
  }
  const uint64_t before = reader_->read_bytes();
  const absl::StatusOr<std::optional<log::LogReader::Record>> bytes =
      reader_->Next();
  progress_->Add(static_cast<int64_t>(reader_->read_bytes() - before));
  context_.dispatcher.recovery().SetTimeLeft(progress_->TimeLeft());
  if (!bytes.ok()) {
    Pass(
        bytes.status(), [this] { Advance(); },
        [this](const absl::Status& status) { Finish(status); });
  } else if (*bytes) {
    ApplyRecord(**bytes);
  } else {
    Finish(absl::OkStatus());
  }
}

void LogReplay::ApplyRecord(const log::LogReader::Record& bytes) {
  absl::StatusOr<log::Record> record = log::DecodeRecord(bytes.bytes);
  if (!record.ok()) {
    Finish(absl::DataLossError(
        absl::StrCat("record ", bytes.sequence,
                     " of the log: ", record.status().message())));
    return;
  }
  const Next next = [this,
                     sequence = bytes.sequence](const absl::Status& status) {
    if (status.ok()) {
      EndRecord(sequence);
      Advance();
    } else {
      Finish(absl::Status(status.code(),
                          absl::StrCat("record ", sequence,
                                       " of the log: ", status.message())));
    }
  };
  std::visit([this, &next](auto& kind) { Apply(kind, next); }, *record);
}

void LogReplay::EndRecord(uint64_t sequence) {
  const auto ended = last_records_.equal_range(sequence);
  for (auto it = ended.first; it != ended.second; ++it) {
    const std::string& name = it->second;
    // The adapter has no later record, so its open requests did not complete.
    GiveUpIf([&](AdapterKey key) { return NameOf(key) == name; });
    if (IsMoving(name)) continue;
    if (HasAccepted(name)) {
      late_.push_back(name);
    } else {
      context_.dispatcher.recovery().SetReady(name);
    }
  }
  last_records_.erase(ended.first, ended.second);
}

bool LogReplay::HasAccepted(const std::string& adapter_id) const {
  return std::ranges::any_of(accepted_, [&](const auto& entry) {
    return NameOf(entry.second.key) == adapter_id;
  });
}

bool LogReplay::IsMoving(const std::string& adapter_id) const {
  const std::string unit = UnitOf(adapter_id);
  return moves_.leaving.contains(unit) || moves_.arriving.contains(unit);
}

void LogReplay::ResumeSteps() {
  for (auto& [work, step] : accepted_) resume_(step);
  accepted_.clear();
  for (const std::string& name : std::exchange(late_, {})) {
    context_.dispatcher.recovery().SetReady(name);
  }
}

void LogReplay::Finish(const absl::Status& status) {
  progress_.reset();
  context_.dispatcher.recovery().SetTimeLeft(absl::ZeroDuration());
  reader_.reset();
  while (!begun_.empty()) GiveUp(begun_.begin());
  if (status.ok()) {
    ResumeSteps();
    resume_moves_(std::exchange(moves_, {}));
  }
  done_(status);
}

std::string LogReplay::NameOf(AdapterKey key) const {
  return context_.dispatcher.adapters().NameOf(key);
}

void LogReplay::WithAdapters(const std::vector<AdapterKey>& keys,
                             const std::function<absl::Status()>& body,
                             const Next& next) {
  BringIn(keys, 0, [this, keys, body, next](const absl::Status& room) {
    const log::Recorder::Replaying replaying(&context_.recorder);
    used_device_ = true;
    const absl::Time start = SteadyNow();
    const absl::Status status = room.ok() ? body() : room;
    report_.device_time += SteadyNow() - start;
    for (const AdapterKey key : keys) Unpin(key);
    next(status);
  });
}

void LogReplay::FetchTeachers(const log::BatchRecord& batch, size_t first,
                              const Next& ready) {
  if (first == batch.slices.size()) return ready(absl::OkStatus());
  const StepTask& step = begun_.at(batch.slices[first].work_id).step;
  if (!trainer_.NeedsTeacher(step)) {
    return FetchTeachers(batch, first + 1, ready);
  }
  trainer_.FetchTeacher(
      step, [this, batch, first, ready](const absl::Status& fetched) {
        fetched.ok() ? FetchTeachers(batch, first + 1, ready) : ready(fetched);
      });
}

void LogReplay::BringIn(const std::vector<AdapterKey>& keys, size_t first,
                        const Next& ready) {
  if (first == keys.size()) {
    ready(absl::OkStatus());
    return;
  }
  context_.dispatcher.recovery().Pin(keys[first], true);
  context_.dispatcher.adapters().WhenOnDevice(
      keys[first], [this, keys, first, ready](const absl::Status& room) {
        if (room.ok()) {
          BringIn(keys, first + 1, ready);
        } else {
          ready(room);
        }
      });
}

}  // namespace weft::engine
