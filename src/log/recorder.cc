#include "src/log/recorder.h"

#include <utility>
#include <variant>

#include "src/base/reason.h"
#include "src/request/move_unit.h"

namespace weft::log {

void Recorder::Start(std::unique_ptr<LogWriter> log, const ReplayCost& cost,
                     absl::Duration read_time, std::string settings,
                     std::set<AdapterKey> adapters, Notes notes) {
  owned_ = std::move(log);
  settings_ = std::move(settings);
  adapters_ = std::move(adapters);
  MutexLock lock(&mu_);
  cost_ = cost;
  read_time_ = read_time;
  notes_ = std::move(notes);
  log_.store(owned_.get());
  AppendLocked(Encode(SettingsRecord{.settings = settings_}));
}

void Recorder::Stop() {
  std::unique_ptr<LogWriter> log;
  MutexLock lock(&mu_);
  log_.store(nullptr);
  log = std::move(owned_);
}

void Recorder::Append(std::string bytes) {
  MutexLock lock(&mu_);
  AppendLocked(std::move(bytes));
}

void Recorder::AppendLocked(std::string bytes) {
  cost_.bytes += bytes.size();
  cost_.time += read_time_;
  log_.load()->Append(std::move(bytes));
}

void Recorder::AddCost(absl::Duration device_time) {
  MutexLock lock(&mu_);
  cost_.time += device_time;
}

ReplayCost Recorder::cost() const {
  MutexLock lock(&mu_);
  return cost_;
}

void Recorder::Accept(uint64_t work, AdapterKey key, std::string bytes) {
  bytes += EncodePlace(work, key);
  MutexLock lock(&mu_);
  if (recording()) AppendLocked(std::move(bytes));
}

bool Recorder::PutNote(const std::string& name,
                       std::shared_ptr<const std::string> value) {
  if (!recording()) return true;
  std::string bytes = EncodeNote(name, value.get());
  MutexLock lock(&mu_);
  if (!recording()) return true;
  const std::string unit = UnitOfNote(name);
  if (held_.contains(unit) || left_.contains(unit)) return false;
  notes_[name] = std::move(value);
  AppendLocked(std::move(bytes));
  return true;
}

void Recorder::EraseNote(const std::string& name) {
  MutexLock lock(&mu_);
  if (!recording() || held_.contains(UnitOfNote(name))) return;
  if (notes_.erase(name) > 0) AppendLocked(EncodeNote(name, nullptr));
}

Notes Recorder::NotesWith(const std::string& prefix) const {
  MutexLock lock(&mu_);
  Notes notes;
  for (auto it = notes_.lower_bound(prefix);
       it != notes_.end() && it->first.starts_with(prefix); ++it) {
    notes.insert(*it);
  }
  return notes;
}

void Recorder::HoldNotes(const std::string& unit) {
  MutexLock lock(&mu_);
  held_.insert(unit);
}

void Recorder::ReleaseNotes(const std::string& unit) {
  MutexLock lock(&mu_);
  held_.erase(unit);
}

template <typename Visit>
void Recorder::VisitNotes(const std::string& unit, const Visit& visit) const {
  for (const std::string& prefix : NotePrefixesOf(unit)) {
    for (auto it = notes_.lower_bound(prefix);
         it != notes_.end() && it->first.starts_with(prefix); ++it) {
      if (UnitOfNote(it->first) != unit) continue;
      if (!visit(it->first, it->second)) return;
    }
  }
}

std::vector<NoteRecord> Recorder::NotesOf(const std::string& unit) const {
  MutexLock lock(&mu_);
  std::vector<NoteRecord> notes;
  VisitNotes(unit, [&notes](const std::string& name, const auto& value) {
    notes.push_back({name, *value});
    return true;
  });
  return notes;
}

bool Recorder::HasNotes(const std::string& unit) const {
  MutexLock lock(&mu_);
  bool has = false;
  VisitNotes(unit, [&has](const std::string&, const auto&) {
    has = true;
    return false;
  });
  return has;
}

std::string Recorder::UnitWithNotes() const {
  MutexLock lock(&mu_);
  for (const auto& [name, value] : notes_) {
    if (std::string unit = UnitOfNote(name); !unit.empty()) return unit;
  }
  return "";
}

void Recorder::Own(const ArrivingRecord& arriving) {
  for (const StoredAdapter& adapter : arriving.adapters) {
    adapters_.insert(adapter.key);
  }
  MutexLock lock(&mu_);
  for (const NoteRecord& note : arriving.notes) {
    notes_[note.name] = std::make_shared<const std::string>(*note.value);
  }
  left_.erase(arriving.unit);
  AppendLocked(
      Encode(MoveRecord{.unit = arriving.unit, .stage = MoveStage::kOwn}));
}

void Recorder::Left(const std::string& unit,
                    const std::vector<AdapterKey>& keys) {
  for (const AdapterKey key : keys) adapters_.erase(key);
  MutexLock lock(&mu_);
  std::erase_if(notes_, [&unit](const auto& note) {
    return UnitOfNote(note.first) == unit;
  });
  // What still runs here for the unit must not leave a note behind.
  left_.insert(unit);
  AppendLocked(Encode(MoveRecord{.unit = unit, .stage = MoveStage::kLeft}));
}

void Recorder::Write(const Record& record) {
  if (!records()) return;
  const auto* adapter = std::get_if<StoredAdapter>(&record);
  const std::optional<AdapterKey> key = KeyOf(record);
  if (adapter != nullptr) {
    if (adapter->image) AddImage(adapter->image->file, /*recorded=*/true);
    adapters_.insert(adapter->key);
  } else if (key && !Has(*key)) {
    return;
  }
  if (const auto* arriving = std::get_if<ArrivingRecord>(&record)) {
    for (const StoredAdapter& arrives : arriving->adapters) {
      AddImage(arrives.image->file, /*recorded=*/true);
    }
  }
  if (const auto* loaded = std::get_if<LoadedRecord>(&record)) {
    AddImage(loaded->file, /*recorded=*/true);
  }
  Append(Encode(record));
  if (std::holds_alternative<RemovedRecord>(record)) adapters_.erase(*key);
}

void Recorder::BeginSnapshot(Snapshot* snapshot) {
  MutexLock lock(&mu_);
  before_snapshot_ = cost_;
  std::erase_if(images_, [](const auto& image) { return image.second; });
  snapshot->notes = notes_;
  snapshot->first_sequence = log_.load()->StartSegment();
  AppendLocked(Encode(SettingsRecord{.settings = settings_}));
}

void Recorder::FinishSnapshot() {
  MutexLock lock(&mu_);
  cost_.bytes -= before_snapshot_.bytes;
  cost_.time -= before_snapshot_.time;
}

void Recorder::AddImage(const std::string& name, bool recorded) {
  MutexLock lock(&mu_);
  images_[name] = recorded;
}

void Recorder::DropImage(const std::string& name) {
  MutexLock lock(&mu_);
  images_.erase(name);
}

std::set<std::string> Recorder::Images() const {
  MutexLock lock(&mu_);
  std::set<std::string> names;
  for (const auto& [name, recorded] : images_) names.insert(name);
  return names;
}

void Recorder::Batch(const std::vector<StepSlice>& slices) {
  if (!records()) return;
  BatchRecord batch;
  for (const auto& [slice, step] : slices) {
    if (!Has(step.adapter)) continue;
    batch.slices.push_back(slice);
    if (begun_.insert(step.id).second && !step.kept) {
      Append(EncodeBegin(step.id, step.adapter, step.step, *step.digest,
                         *step.request));
    }
    if (slice.last) begun_.erase(step.id);
  }
  if (!batch.slices.empty()) Append(Encode(batch));
}

void Recorder::Forget(uint64_t work) {
  if (begun_.erase(work) > 0) Append(Encode(GivenUpRecord{.work = work}));
}

void Recorder::Done(const StepTask& step, const StepResult& result) {
  if (!records() || !Has(step.adapter)) return;
  DoneRecord done{.key = step.adapter, .step = step.step, .result = result};
  // Stores the request only if a replay must run the step again. A replay does
  // not repeat a save, whose checkpoint is on disk, or a scoring, whose scores
  // are in the result, or a failed step. But it repeats an OptimStep that
  // failed because the gradient was not finite: such a step clears the
  // gradient.
  const auto* failure = std::get_if<StepFailure>(&result);
  const bool optim = std::holds_alternative<OptimStepRequest>(*step.request);
  const bool again =
      failure != nullptr
          ? optim && absl::IsFailedPrecondition(failure->status)
          : optim ||
                std::holds_alternative<PublishSnapshotRequest>(*step.request);
  if (step.kept) {
    done.accepted = step.id;
    done.again = again;
  } else {
    done.digest = *step.digest;
    if (again) done.request = *step.request;
  }
  Append(Encode(done));
}

void Recorder::WhenDurable(std::function<void()> task) {
  if (LogWriter* const log = log_.load()) {
    log->WhenDurable(std::move(task));
  } else {
    task();
  }
}

absl::Status Recorder::CheckRoom() const {
  const LogWriter* const log = log_.load();
  const absl::Status room = log == nullptr ? absl::OkStatus() : log->stalled();
  if (room.ok()) return room;
  return WithReason(
      room, {.name = absl::IsUnavailable(room) ? "STATE_STORE_UNREACHABLE"
                                               : "STATE_DISK_FULL",
             .values = {}});
}

absl::Status Recorder::failure() const {
  const LogWriter* const log = log_.load();
  return log == nullptr ? absl::OkStatus() : log->failure();
}

}  // namespace weft::log
