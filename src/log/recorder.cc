#include "src/log/recorder.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"

namespace weft::records {

namespace {

// A census (Trail::census) is due after kCensusRecords records. If there are
// more adapters than kCensusRecords, it is due after as many records as there
// are adapters. It is also due if the last census is at least kCensusInterval
// old.
constexpr uint64_t kCensusRecords = 64;
constexpr absl::Duration kCensusInterval = absl::Seconds(1);

}  // namespace

void Recorder::Start(std::unique_ptr<journal::LogWriter> log,
                     const ReplayCost& cost, std::string settings, Marks marks,
                     RestorePoints restores) {
  owned_ = std::move(log);
  cost_ = cost;
  settings_ = std::move(settings);
  marks_ = std::move(marks);
  restores_ = std::move(restores);
  log_.store(owned_.get());
  Append(Encode(SettingsRecord{.settings = settings_}), {});
}

void Recorder::Append(std::string bytes, const std::set<AdapterKey>& keys) {
  Trail trail;
  // Skips adapters without a mark: the log does not have them.
  for (const AdapterKey key : keys) {
    const auto mark = marks_.find(key);
    if (mark == marks_.end()) continue;
    trail.marks.push_back({.key = key, .last = mark->second.last, .name = {}});
  }
  if (CensusIsDue()) trail.census = Census();
  bytes += Encode(trail);
  cost_.bytes += bytes.size();
  const uint64_t sequence = log_.load()->Append(std::move(bytes));
  for (const Mark& mark : trail.marks) marks_.at(mark.key).last = sequence;
  ++since_census_;
  if (!trail.census) return;
  since_census_ = 0;
  census_at_ = SteadyNow();
}

bool Recorder::CensusIsDue() const {
  return since_census_ >= std::max<uint64_t>(kCensusRecords, marks_.size()) ||
         SteadyNow() - census_at_ >= kCensusInterval;
}

std::vector<Mark> Recorder::Census() const {
  std::vector<Mark> census;
  for (const auto& [key, mark] : marks_) {
    census.push_back(mark);
  }
  return census;
}

void Recorder::Write(const Record& record) {
  if (!records()) return;
  const auto* adapter = std::get_if<StoredAdapter>(&record);
  const std::optional<AdapterKey> key = KeyOf(record);
  if (adapter != nullptr) {
    if (adapter->image) AddImage(adapter->image->file, /*recorded=*/true);
    marks_[adapter->key] = {
        .key = adapter->key, .last = 0, .name = adapter->adapter_id};
  } else if (key && !marks_.contains(*key)) {
    return;
  }
  if (std::holds_alternative<ReleaseRecord>(record) && !HasSteps(*key)) return;
  const auto* loaded = std::get_if<LoadedRecord>(&record);
  if (loaded != nullptr && !loaded->file.empty()) {
    AddImage(loaded->file, /*recorded=*/true);
  }
  restores_.Follow(record);
  Append(Encode(record), key ? std::set{*key} : std::set<AdapterKey>());
  if (std::holds_alternative<RemovedRecord>(record)) marks_.erase(*key);
}

bool Recorder::HasSteps(AdapterKey key) const {
  return marks_.contains(key) && !restores_.contains(key);
}

uint64_t Recorder::BeginSnapshot() {
  before_snapshot_ = cost_;
  {
    MutexLock lock(&mu_);
    std::erase_if(images_, [](const auto& image) { return image.second; });
  }
  const uint64_t first = log_.load()->StartSegment();
  census_at_ = absl::InfinitePast();  // The next record has a census.
  Append(Encode(SettingsRecord{.settings = settings_}), {});
  return first;
}

void Recorder::FinishSnapshot() {
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

void Recorder::Batch(const dispatch::RunTrain& train) {
  if (!records() || !train.backward) return;
  std::set<AdapterKey> keys;
  BatchRecord batch;
  for (size_t i = 0; i < train.slices.size(); ++i) {
    const dispatch::StepTask& step = train.steps[i];
    if (!HasSteps(step.adapter)) continue;
    keys.insert(step.adapter);
    batch.slices.push_back(train.slices[i]);
    if (begun_.insert(step.id).second) {
      Append(EncodeBegin(step.id, step.adapter, step.step, *step.digest,
                         *step.request),
             {step.adapter});
    }
    if (train.slices[i].last) begun_.erase(step.id);
  }
  if (!keys.empty()) Append(Encode(batch), keys);
}

void Recorder::Forget(uint64_t work) {
  if (begun_.erase(work) > 0) Append(Encode(GivenUpRecord{.work = work}), {});
}

void Recorder::Done(const dispatch::StepTask& step, const StepResult& result) {
  if (!records() || !marks_.contains(step.adapter)) return;
  DoneRecord done{.key = step.adapter,
                  .step = step.step,
                  .digest = *step.digest,
                  .request = {},
                  .result = result};
  // Stores the request only if a replay must run the step again. A replay does
  // not repeat a save, whose checkpoint is on disk, or a scoring, whose scores
  // are in the result. It repeats even an OptimStep that failed because the
  // gradient was not finite: such a step clears the gradient.
  if (std::holds_alternative<OptimStepRequest>(*step.request) ||
      std::holds_alternative<PublishSnapshotRequest>(*step.request)) {
    done.request = *step.request;
  }
  if (HasSteps(step.adapter)) {
    Append(Encode(done), {step.adapter});
  } else if (const auto* saved = std::get_if<CheckpointInfo>(&result);
             saved != nullptr && saved->kind == CheckpointKind::kTrain) {
    Write(done);
  }
}

std::string Recorder::NewImageName() {
  return absl::StrCat(absl::ToUnixMicros(absl::Now()), "-",
                      num_images_.fetch_add(1));
}

void Recorder::WhenDurable(std::function<void()> task) {
  if (journal::LogWriter* const log = log_.load()) {
    log->WhenDurable(std::move(task));
  } else {
    task();
  }
}

absl::Status Recorder::CheckRoom() const {
  const journal::LogWriter* const log = log_.load();
  return log == nullptr ? absl::OkStatus() : log->stalled();
}

absl::Status Recorder::failure() const {
  const journal::LogWriter* const log = log_.load();
  return log == nullptr ? absl::OkStatus() : log->failure();
}

}  // namespace weft::records
