#include "src/log/log_summary.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/log/image.h"
#include "src/request/move_unit.h"

namespace weft::log {
namespace {

class LogSurvey {
 public:
  LogSurvey(const State* state, const LogReading* reading)
      : state_(*state), reading_(*reading) {}

  void Add(const Snapshot& snapshot) {
    first_sequence_ = snapshot.first_sequence;
    summary_.next_key = snapshot.next_key;
    summary_.last_epoch = snapshot.last_epoch;
    summary_.notes = snapshot.notes;
    for (const StoredAdapter& adapter : snapshot.adapters) {
      Know(adapter);
    }
    for (const AcceptedRecord& accepted : snapshot.accepted) {
      Accept(accepted);
      Touch(accepted.key, /*sequence=*/0);
    }
  }

  absl::StatusOr<LogSummary> Run() {
    WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<LogReader> reader,
                          state_.OpenLog(first_sequence_));
    for (;;) {
      WEFT_ASSIGN_OR_RETURN(const auto record, reader->Next());
      if (!record) break;
      const absl::Status added = Add(*record);
      if (!added.ok()) {
        return absl::Status(added.code(),
                            absl::StrCat("record ", record->sequence,
                                         " of the log: ", added.message()));
      }
    }
    summary_.num_bytes = reader->read_bytes();
    summary_.torn_bytes = reader->torn_bytes();
    if (reading_.cuts) WEFT_RETURN_IF_ERROR(reader->Repair());
    summary_.next_sequence = reader->next_sequence();
    for (const auto& [key, owner] : owners_) {
      summary_.adapters.insert(key);
      if (!leaving_.contains(UnitOf(owner.id))) summary_.names.insert(owner.id);
    }
    summary_.moving = leaving_;
    for (const auto& [unit, arriving] : arriving_) summary_.moving.insert(unit);
    for (const auto& [work, begun] : begun_) {
      if (begun.accepted && !begun.between_slices) continue;
      summary_.given_up.push_back(work);
    }
    return std::move(summary_);
  }

 private:
  struct Owner {
    std::string id;
    std::string tenant;
  };
  // A request that has begun or was accepted, and has not ended.
  struct Begun {
    AdapterKey key = AdapterKey::kBaseModel;
    std::string teacher;  // The id of the adapter that is the teacher.
    // At this point of the log, a replay has the request's gradients on the
    // device.
    bool between_slices = false;
    bool accepted = false;
  };

  void Know(const StoredAdapter& adapter) {
    owners_[adapter.key] = {.id = adapter.adapter_id, .tenant = adapter.tenant};
  }

  // Returns the id of the adapter that teaches a request, or "".
  static std::string TeacherOf(const StepRequest& request) {
    const auto* train = std::get_if<TrainRequest>(&request);
    return train == nullptr ? "" : train->loss.teacher.adapter_id;
  }

  void Accept(const AcceptedRecord& accepted) {
    summary_.next_work = std::max(summary_.next_work, accepted.work + 1);
    begun_[accepted.work] = {
        .key = accepted.key,
        .teacher = accepted.request ? TeacherOf(*accepted.request) : "",
        .accepted = true};
  }

  // Notes that the replay of the record `sequence` changes the adapter. Does
  // nothing for an adapter that is removed.
  void Touch(AdapterKey key, uint64_t sequence) {
    const auto owner = owners_.find(key);
    if (owner == owners_.end()) return;
    summary_.changed[owner->second.id] = {.last = sequence,
                                          .tenant = owner->second.tenant};
  }

  // Notes that the replay of the record `sequence` reads the adapter, which
  // therefore must not change before.
  void TouchTeacher(const std::string& id, uint64_t sequence) {
    if (const auto known = summary_.changed.find(id);
        known != summary_.changed.end()) {
      known->second.last = sequence;
      return;
    }
    const auto owner = std::ranges::find_if(
        owners_, [&id](const auto& entry) { return entry.second.id == id; });
    if (owner != owners_.end()) Touch(owner->first, sequence);
  }

  // Notes the key and the epoch of a new adapter. No later adapter may use
  // them, even if this adapter is skipped or removed.
  void Reserve(const Record& record) {
    if (const auto* adapter = std::get_if<StoredAdapter>(&record)) {
      Reserve(*adapter);
    } else if (const auto* arriving = std::get_if<ArrivingRecord>(&record)) {
      for (const StoredAdapter& arrives : arriving->adapters) Reserve(arrives);
    }
  }
  void Reserve(const StoredAdapter& adapter) {
    const auto key = static_cast<uint64_t>(adapter.key);
    summary_.next_key = std::max(summary_.next_key, key + 1);
    summary_.last_epoch = std::max(summary_.last_epoch, adapter.epoch);
  }

  absl::Status Add(const LogReader::Record& bytes) {
    WEFT_ASSIGN_OR_RETURN(const Record record, DecodeRecord(bytes.bytes));
    ++summary_.num_records;
    Reserve(record);
    const std::optional<AdapterKey> key = KeyOf(record);
    sequence_ = bytes.sequence;
    WEFT_RETURN_IF_ERROR(
        std::visit([this](const auto& kind) { return Apply(kind); }, record));
    if (key) Touch(*key, sequence_);
    return absl::OkStatus();
  }

  absl::Status Apply(const StoredAdapter& adapter) {
    Know(adapter);
    if (!adapter.image) return CheckSlots({adapter.key});
    return CheckImage(adapter.image->file, adapter.image->versions.size());
  }

  absl::Status Apply(const RemovedRecord& removed) {
    std::erase_if(begun_, [&](const auto& entry) {
      return entry.second.key == removed.key;
    });
    Touch(removed.key, sequence_);
    owners_.erase(removed.key);
    return absl::OkStatus();
  }

  absl::Status Apply(const BeginRecord& begin) {
    begun_[begin.work] = {.key = begin.key,
                          .teacher = TeacherOf(begin.request)};
    return absl::OkStatus();
  }

  absl::Status Apply(const AcceptedRecord& accepted) {
    Accept(accepted);
    if (accepted.request || accepted.refused) return absl::OkStatus();
    return absl::DataLossError("an accepted step has no request");
  }

  absl::Status Apply(const GivenUpRecord& given_up) {
    const auto begun = begun_.find(given_up.work);
    if (begun == begun_.end()) return absl::OkStatus();
    Touch(begun->second.key, sequence_);
    begun->second.between_slices = false;
    if (!begun->second.accepted) begun_.erase(begun);
    return absl::OkStatus();
  }

  absl::Status Apply(const BatchRecord& batch) {
    std::set<AdapterKey> keys;
    for (const TrainSlice& slice : batch.slices) {
      const auto begun = begun_.find(slice.work_id);
      if (begun == begun_.end()) {
        return absl::DataLossError(absl::StrCat(
            "a batch names request ", slice.work_id, ", which has not begun"));
      }
      keys.insert(begun->second.key);
    }
    WEFT_RETURN_IF_ERROR(CheckSlots(keys));
    for (const AdapterKey key : keys) Touch(key, sequence_);
    for (const TrainSlice& slice : batch.slices) {
      const auto begun = begun_.find(slice.work_id);
      if (!begun->second.teacher.empty()) {
        TouchTeacher(begun->second.teacher, sequence_);
      }
      begun->second.between_slices = true;
      if (slice.last) begun_.erase(begun);
    }
    return absl::OkStatus();
  }

  absl::Status Apply(const DoneRecord& done) {
    begun_.erase(done.accepted);
    return done.request || done.again ? CheckSlots({done.key})
                                      : absl::OkStatus();
  }

  absl::Status Apply(const LoadedRecord& loaded) {
    begun_.erase(loaded.accepted);
    WEFT_RETURN_IF_ERROR(CheckImage(loaded.file, /*num_versions=*/1));
    return CheckSlots({loaded.key});
  }

  absl::Status Apply(const ReleaseRecord& /*release*/) {
    return absl::OkStatus();
  }

  absl::Status Apply(const NoteRecord& note) {
    if (note.value) {
      summary_.notes[note.name] =
          std::make_shared<const std::string>(*note.value);
    } else {
      summary_.notes.erase(note.name);
    }
    return absl::OkStatus();
  }

  absl::Status Apply(const SettingsRecord& /*settings*/) {
    return absl::OkStatus();
  }

  // What becomes of it decides whether its image must be there.
  absl::Status Apply(const ArrivingRecord& arriving) {
    for (const StoredAdapter& adapter : arriving.adapters) {
      if (!adapter.image) {
        return absl::DataLossError("an arriving adapter has no image");
      }
      summary_.changed[adapter.adapter_id] = {.last = sequence_,
                                              .tenant = adapter.tenant};
    }
    arriving_[arriving.unit] = arriving;
    return absl::OkStatus();
  }

  absl::Status Apply(const MoveRecord& move) {
    for (const AdapterKey key : KeysOf(move.unit)) Touch(key, sequence_);
    switch (move.stage) {
      case MoveStage::kLeaving:
        leaving_.insert(move.unit);
        return absl::OkStatus();
      case MoveStage::kStayed:
        leaving_.erase(move.unit);
        return absl::OkStatus();
      case MoveStage::kLeft:
        return Leave(move.unit);
      case MoveStage::kOwn:
      case MoveStage::kDropped:
        return Arrive(move);
    }
    return absl::DataLossError("a move has an unknown stage");
  }

  std::vector<AdapterKey> KeysOf(const std::string& unit) const {
    std::vector<AdapterKey> keys;
    for (const auto& [key, owner] : owners_) {
      if (UnitOf(owner.id) == unit) keys.push_back(key);
    }
    return keys;
  }

  absl::Status Leave(const std::string& unit) {
    for (const AdapterKey key : KeysOf(unit)) {
      WEFT_RETURN_IF_ERROR(Apply(RemovedRecord{.key = key}));
    }
    std::erase_if(summary_.notes, [&unit](const auto& note) {
      return UnitOfNote(note.first) == unit;
    });
    leaving_.erase(unit);
    return absl::OkStatus();
  }

  absl::Status Arrive(const MoveRecord& move) {
    const auto node = arriving_.extract(move.unit);
    if (node.empty()) {
      return absl::DataLossError("a unit has arrived that was not on its way");
    }
    const ArrivingRecord& arriving = node.mapped();
    for (const StoredAdapter& adapter : arriving.adapters) {
      summary_.changed[adapter.adapter_id].last = sequence_;
    }
    if (move.stage == MoveStage::kDropped) return absl::OkStatus();
    for (const StoredAdapter& adapter : arriving.adapters) {
      WEFT_RETURN_IF_ERROR(Apply(adapter));
    }
    for (const NoteRecord& note : arriving.notes) {
      WEFT_RETURN_IF_ERROR(Apply(note));
    }
    return absl::OkStatus();
  }

  absl::Status CheckImage(const std::string& file, size_t num_versions) const {
    const size_t num_blocks = kStateBlocks + num_versions;
    return reading_.check_image ? reading_.check_image(file, num_blocks)
                                : CheckImageTable(state_, file, num_blocks);
  }

  // Checks that the device has room for the adapters in `together` and all
  // adapters that have a request between two slices.
  absl::Status CheckSlots(std::set<AdapterKey> together) const {
    for (const auto& [work, begun] : begun_) {
      if (begun.between_slices) together.insert(begun.key);
    }
    if (together.size() <= reading_.max_resident) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "a batch of the log has ", together.size(),
        " adapters on the device together, and now there is room for ",
        reading_.max_resident, " (--max-resident-adapters)"));
  }

  const State& state_;
  const LogReading& reading_;
  uint64_t first_sequence_ = 1;
  uint64_t sequence_ = 0;               // Sequence of the record being applied.
  std::map<AdapterKey, Owner> owners_;  // Adapters that exist.
  // The units with an open move.
  std::set<std::string> leaving_;
  std::map<std::string, ArrivingRecord> arriving_;
  std::map<uint64_t, Begun> begun_;  // By `work`.
  LogSummary summary_;
};

}  // namespace

absl::StatusOr<Snapshot> ReadSnapshot(const State& state) {
  WEFT_ASSIGN_OR_RETURN(const std::optional<SnapshotFile> file,
                        state.ReadSnapshot());
  return ToSnapshot(file);
}

absl::StatusOr<Snapshot> ToSnapshot(const std::optional<SnapshotFile>& file) {
  if (!file) return Snapshot();
  WEFT_ASSIGN_OR_RETURN(Snapshot snapshot, DecodeSnapshot(file->bytes));
  snapshot.first_sequence = file->next_sequence;
  return snapshot;
}

absl::StatusOr<LogSummary> ReadLog(const State& state, const Snapshot& snapshot,
                                   const LogReading& reading) {
  LogSurvey survey(&state, &reading);
  survey.Add(snapshot);
  return survey.Run();
}

}  // namespace weft::log
