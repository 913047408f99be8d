#include "src/engine/recovery/snapshotter.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <span>
#include <utility>

#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"
#include "src/engine/adapters/state_image.h"
#include "src/engine/device/compute_guard.h"
#include "src/log/image.h"

namespace weft::engine {
namespace {

// If the copies that wait for the disk exceed this many bytes, the engine
// thread waits before it makes another copy.
constexpr uint64_t kMaxBytesInFlight = uint64_t{1} << 30;
// GoOn makes another copy only if fewer files than this are being written.
// BeforeChange makes its copy regardless of this limit.
constexpr int kMaxFilesInFlight = 2;
constexpr absl::Duration kRetry = absl::Seconds(10);
constexpr absl::Duration kLongestRoomPause = absl::Minutes(1);
// If a replay takes longer than this, a last snapshot may take longer than the
// replay, up to kLongestLastSnapshot. A slow stop is better than a slow start,
// because clients wait for a start, but not for a stop.
constexpr absl::Duration kQuickReplay = absl::Seconds(5);
// A last snapshot that takes longer than the replay may take this long. After a
// drain, supervisors wait only a little longer than this before they kill the
// process.
constexpr absl::Duration kLongestLastSnapshot = absl::Seconds(45);
constexpr absl::Duration kPoll = absl::Milliseconds(1);
constexpr std::chrono::milliseconds kStorePoll(100);

}  // namespace

bool WorthLastSnapshot(absl::Duration replay, uint64_t bytes,
                       double bytes_per_second) {
  const absl::Duration writing =
      absl::Seconds(static_cast<double>(bytes) / bytes_per_second);
  return replay > writing ||
         (replay > kQuickReplay && writing <= kLongestLastSnapshot);
}

bool Snapshotter::IsDue() const {
  const EngineOptions& options = context_.options;
  const log::ReplayCost cost = context_.recorder.cost();
  // After a failure the dispatcher drops kept steps, which a snapshot would
  // lack then.
  if (moving_ || !context_.recorder.recording() ||
      !context_.guard.failure().ok() || !context_.state->answers()) {
    return false;
  }
  if (!requests_.empty()) return true;
  if (SteadyNow() < not_before_) return false;
  if (cost.bytes > static_cast<uint64_t>(options.snapshot_log_bytes) ||
      cost.time > absl::Seconds(options.snapshot_replay_seconds)) {
    return true;
  }
  // While new work is refused for lack of room, a snapshot may make room: it
  // cuts the log and removes the images of adapters that are gone.
  return cost.bytes > 0 && SteadyNow() >= no_room_before_ &&
         !context_.recorder.CheckRoom().ok();
}

uint64_t Snapshotter::ChangedBytes() const {
  uint64_t bytes = 0;
  for (const AdapterKey key : LoggedKeys()) {
    const bool on_disk =
        images_.contains(key) || context_.adapters.File(key).durable;
    if (!on_disk) bytes += context_.adapters.ImageBytes(key);
  }
  return bytes;
}

std::vector<AdapterKey> Snapshotter::LoggedKeys() const {
  std::vector<AdapterKey> keys = context_.dispatcher.recovery().Keys();
  std::erase_if(keys,
                [this](AdapterKey key) { return !context_.recorder.Has(key); });
  return keys;
}

void Snapshotter::WriteLast() {
  if (!context_.recorder.recording()) return;
  const uint64_t bytes = ChangedBytes();
  if (phase_ == Phase::kIdle) {
    if (moving_) return;
    const absl::Duration replay = context_.recorder.cost().time;
    if (!WorthLastSnapshot(replay, bytes, BytesPerSecond())) return;
    Log(LogLevel::kInfo, "writing a last snapshot",
        {{"bytes", bytes}, {"saves_seconds", absl::ToDoubleSeconds(replay)}});
    Begin();
  }
  RunToEnd();
}

void Snapshotter::RunToEnd() {
  while (phase_ != Phase::kIdle) {
    GoOn();
    absl::SleepFor(kPoll);
  }
}

void Snapshotter::GoOn() {
  if (phase_ == Phase::kIdle) {
    // A snapshot never divides a request.
    if (context_.dispatcher.recovery().FinishSlices(IsDue())) Begin();
    return;
  }
  int in_flight = 0;
  absl::Status status;
  {
    MutexLock lock(&mu_);
    in_flight = files_in_flight_;
    status = status_;
  }
  if (!status.ok()) {
    if (in_flight == 0) GiveUp(status);
  } else if (!pending_.empty()) {
    if (in_flight < kMaxFilesInFlight) Copy(*pending_.begin());
  } else if (in_flight == 0) {
    Finish();
  }
}

void Snapshotter::GiveUp(const absl::Status& status) {
  Log(LogLevel::kError, "no snapshot could be written: the log stays",
      {{"reason", status.message()}});
  not_before_ = SteadyNow() + kRetry;
  Answer(status);
  // In kWriting, the snapshot may already be on disk. The new images are kept,
  // because the snapshot refers to them.
  if (phase_ == Phase::kCopying) {
    for (const std::string& name : new_images_) DropState(context_, name);
  }
  new_images_.clear();
  pending_.clear();
  snapshot_ = {};
  images_.clear();  // Some of these images may not exist.
  phase_ = Phase::kIdle;
}

void Snapshotter::Begin() {
  dispatch::RecoveryDesk& desk = context_.dispatcher.recovery();
  phase_ = Phase::kCopying;
  served_ = std::exchange(requests_, {});
  PlanNextForRoom();
  snapshot_ = {.next_key = desk.next_key(), .last_epoch = desk.last_epoch()};
  context_.recorder.BeginSnapshot(&snapshot_);
  snapshot_.accepted = desk.Kept();
  adapters_.clear();
  new_images_.clear();
  {
    MutexLock lock(&mu_);
    status_ = absl::OkStatus();
  }
  for (const AdapterKey key : LoggedKeys()) {
    log::StoredAdapter& record = adapters_[key] = Describe(key);
    const auto image = images_.find(key);
    if (image != images_.end()) {
      record.image = image->second;
    } else if (const ImageFile file = context_.adapters.File(key);
               file.durable) {
      record.image = RecordOf(key, file.name, context_.adapters.Image(key));
    } else {
      pending_.insert(key);
    }
  }
}

void Snapshotter::Answer(const absl::StatusOr<bool>& result) {
  for (Callback<bool>& done : std::exchange(served_, {})) {
    context_.Reply(done, result);
  }
}

void Snapshotter::EndRequests(const absl::Status& status) {
  std::move(requests_.begin(), requests_.end(), std::back_inserter(served_));
  requests_.clear();
  Answer(status);
}

void Snapshotter::PlanNextForRoom() {
  const bool short_of_room = !context_.recorder.CheckRoom().ok();
  if (!short_of_room) {
    room_pause_ = absl::ZeroDuration();
    return;
  }
  room_pause_ = std::clamp(2 * room_pause_, kRetry, kLongestRoomPause);
  no_room_before_ = SteadyNow() + room_pause_;
}

log::StoredAdapter Snapshotter::Describe(AdapterKey key) const {
  dispatch::AdapterHistory history =
      context_.dispatcher.recovery().HistoryOf(key);
  const AdapterInfo& info = history.info;
  return {.key = key,
          .adapter_id = info.adapter_id,
          .tenant = info.tenant,
          .config = info.config,
          .epoch = info.epoch,
          .last_step = info.last_step,
          .next_step = info.next_step,
          .created_at = info.created_at,
          .image = std::nullopt,
          .replies = std::move(history.replies)};
}

log::ImageRecord Snapshotter::RecordOf(AdapterKey key, const std::string& file,
                                       const lora::AdapterImage& image) const {
  log::ImageRecord record{.file = file,
                          .optim_steps = image.optim_steps,
                          .optimizer = image.optimizer,
                          .accumulated_tokens = image.accumulated_tokens,
                          .versions = {},
                          .snapshots = context_.adapters.Snapshots(key)};
  for (const lora::VersionImage& version : image.versions) {
    record.versions.push_back(version.number);
  }
  return record;
}

void Snapshotter::BeforeChange(AdapterKey key) {
  if (pending_.contains(key)) Copy(key);
  images_.erase(key);
}

double Snapshotter::BytesPerSecond() {
  if (context_.options.state.empty()) return kDiskBytesPerSecond;
  MutexLock lock(&mu_);
  if (written_bytes_ == 0) return kStoreBytesPerSecond;
  return static_cast<double>(written_bytes_) /
         absl::ToDoubleSeconds(writing_time_);
}

bool Snapshotter::CountBytes(uint64_t bytes) {
  MutexLock lock(&mu_);
  while (bytes_in_flight_ > kMaxBytesInFlight && status_.ok()) {
    written_.WaitFor(&mu_, kStorePoll);
    if (!context_.state->answers()) {
      status_ = absl::UnavailableError("the store does not answer");
    }
  }
  if (!status_.ok()) return false;
  bytes_in_flight_ += bytes;
  ++files_in_flight_;
  return true;
}

Snapshotter::Copied Snapshotter::CopyOf(AdapterKey key) const {
  Copied copy{.size = static_cast<int64_t>(
                  context_.adapters.Facts(key).info.num_parameters),
              .spilled = context_.adapters.File(key)};
  // On a CPU the image shares the adapter's tensors, which may change before
  // the image is written.
  const bool shared = context_.device.Memory().total == 0;
  copy.status = context_.guard.Guarded("copying an adapter", [&] {
    copy.image = context_.adapters.Image(key);
    if (!shared) return;
    for (at::Tensor* tensor : copy.image.Tensors()) {
      if (tensor->defined()) *tensor = tensor->clone();
    }
  });
  copy.record = RecordOf(key, context_.state->NewImageName(), copy.image);
  return copy;
}

void Snapshotter::Copy(AdapterKey key) {
  pending_.erase(key);
  const uint64_t bytes = context_.adapters.ImageBytes(key);
  if (!CountBytes(bytes)) return;
  Copied copy = CopyOf(key);
  adapters_.at(key).image = copy.record;
  images_[key] = copy.record;
  new_images_.push_back(copy.record.file);
  context_.PostIo("", [this, bytes, copy = std::move(copy)]() mutable {
    absl::Status status;
    {
      MutexLock lock(&mu_);
      status = status_;  // An error: the snapshot has failed.
    }
    if (status.ok()) status = Write(copy);
    copy.image = {};
    MutexLock lock(&mu_);
    bytes_in_flight_ -= bytes;
    --files_in_flight_;
    if (!status.ok()) status_ = status;
    written_.NotifyAll();
  });
}

void Snapshotter::DescribeNow(
    AdapterKey key, std::function<void(absl::StatusOr<Described>)> done) {
  Described described{.adapter = Describe(key)};
  // While a snapshot runs, its images may not be written yet.
  const auto image = images_.find(key);
  if (phase_ == Phase::kIdle && image != images_.end()) {
    described.adapter.image = image->second;
    return done(std::move(described));
  }
  Copied copy = CopyOf(key);
  described.adapter.image = copy.record;
  described.is_new = true;
  // The cut of a snapshot that runs must not remove it.
  context_.recorder.AddImage(copy.record.file, /*recorded=*/false);
  context_.PostIo("", [this, done = std::move(done), copy = std::move(copy),
                       described = std::move(described)]() mutable {
    const absl::Status status = Write(copy);
    context_.dispatcher.Post(
        [this, done = std::move(done), status,
         described = std::move(described)](const absl::Status& open) mutable {
          if (!open.ok()) return;
          if (status.ok()) return done(std::move(described));
          DropState(context_, described.adapter.image->file);
          done(status);
        });
  });
}

absl::Status Snapshotter::Write(Copied& copy) {
  WEFT_RETURN_IF_ERROR(copy.status);
  if (!copy.spilled.name.empty()) {
    WEFT_RETURN_IF_ERROR(
        ReadTensors(context_, spill_, copy.spilled, copy.size, copy.image));
  }
  const std::vector<std::span<const float>> blocks = BlocksOf(copy.image);
  uint64_t bytes = 0;
  for (const std::span<const float> block : blocks) bytes += block.size_bytes();
  const absl::Time start = SteadyNow();
  WEFT_RETURN_IF_ERROR(
      log::WriteImage(*context_.state, copy.record.file, blocks));
  MutexLock lock(&mu_);
  written_bytes_ += bytes;
  writing_time_ += SteadyNow() - start;
  return absl::OkStatus();
}

void Snapshotter::Finish() {
  if (phase_ == Phase::kWriting) {
    context_.recorder.FinishSnapshot();
    phase_ = Phase::kIdle;
    Answer(true);
    return;
  }
  phase_ = Phase::kWriting;
  std::set<std::string> keep;
  for (auto& [key, record] : adapters_) {
    keep.insert(record.image->file);
    snapshot_.adapters.push_back(std::move(record));
  }
  adapters_.clear();
  MutexLock lock(&mu_);
  ++files_in_flight_;
  context_.PostIo("", [this, keep = std::move(keep),
                       snapshot = std::move(snapshot_)]() mutable {
    const uint64_t sequence = snapshot.first_sequence;
    const size_t adapters = snapshot.adapters.size();
    absl::StatusOr<std::string> bytes = Encode(snapshot);
    absl::Status status = bytes.status();
    if (status.ok()) {
      status = context_.state->WriteSnapshot(
          {.next_sequence = sequence, .bytes = *std::move(bytes)});
    }
    if (status.ok()) {
      keep.merge(context_.recorder.Images());
      status = context_.state->Cut(sequence, keep);
    }
    if (status.ok()) {
      Log(LogLevel::kInfo, "snapshot written, log cut",
          {{"adapters", adapters}, {"next_record", sequence}});
    }
    MutexLock inner(&mu_);
    --files_in_flight_;
    status_ = status;
  });
  snapshot_ = {};
}

}  // namespace weft::engine
