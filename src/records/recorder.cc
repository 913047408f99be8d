#include "src/records/recorder.h"

#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace weft::records {

void Recorder::Start(std::unique_ptr<journal::LogWriter> log) {
  owned_ = std::move(log);
  log_.store(owned_.get());
}

void Recorder::Append(std::string bytes) {
  bytes_ += bytes.size();
  log_.load()->Append(std::move(bytes));
}

void Recorder::Write(const Record& record) {
  if (!recording()) return;
  if (const auto* loaded = std::get_if<LoadedRecord>(&record)) {
    AddImage(loaded->file, /*recorded=*/true);
  }
  Append(Encode(record));
}

uint64_t Recorder::BeginSnapshot() {
  bytes_ = 0;
  cost_ = absl::ZeroDuration();
  MutexLock lock(&mu_);
  std::erase_if(images_, [](const auto& image) { return image.second; });
  return log_.load()->StartSegment();
}

void Recorder::AddImage(const std::string& name, bool recorded) {
  MutexLock lock(&mu_);
  images_[name] = recorded;
}

std::set<std::string> Recorder::Images() const {
  MutexLock lock(&mu_);
  std::set<std::string> names;
  for (const auto& [name, recorded] : images_) names.insert(name);
  return names;
}

void Recorder::Batch(const dispatch::RunTrain& train) {
  if (!recording() || !train.backward) return;
  for (size_t i = 0; i < train.slices.size(); ++i) {
    const dispatch::StepTask& step = train.steps[i];
    if (begun_.insert(step.id).second) {
      Append(EncodeBegin(step.id, step.adapter, step.step, *step.digest,
                         *step.request));
    }
    if (train.slices[i].last) begun_.erase(step.id);
  }
  Append(Encode(BatchRecord{.slices = train.slices}));
}

void Recorder::Forget(uint64_t work) {
  if (begun_.erase(work) > 0) Append(Encode(GivenUpRecord{.work = work}));
}

void Recorder::Done(const dispatch::StepTask& step, const StepResult& result) {
  if (!recording() || step.adapter == AdapterKey::kBaseModel) return;
  DoneRecord done{.key = step.adapter,
                  .step = step.step,
                  .digest = *step.digest,
                  .request = {},
                  .result = result};
  // A checkpoint is on disk, scores are the result; what else a step does has
  // to be done again. A gradient that is not finite is cleared again.
  if (std::holds_alternative<OptimStepRequest>(*step.request) ||
      std::holds_alternative<PublishSnapshotRequest>(*step.request)) {
    done.request = *step.request;
  }
  Append(Encode(done));
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
