#include "src/log/log_writer.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/observe/log.h"
#include "src/base/status_macros.h"

namespace weft::log {
namespace {

constexpr const char* kThreadName = "weft-log";
// Records for which nobody waits go to disk with the next that somebody waits
// for, or when they have more bytes than this, or after this time.
constexpr int64_t kMaxIdleBytes = 1 << 20;
constexpr std::chrono::seconds kMaxIdleTime(1);
// Limits the buffer into which a sink copies the records of a group.
constexpr size_t kMaxGroupBytes = 16 << 20;

bool MayTryAgain(const absl::Status& status) {
  return absl::IsResourceExhausted(status) || absl::IsUnavailable(status) ||
         absl::IsDeadlineExceeded(status);
}

}  // namespace

LogMetrics::LogMetrics(prometheus::Registry* registry)
    : bytes(AddCounter(registry, "weft_journal_bytes_total",
                       "Bytes of the log of --state-dir that are on disk.")),
      records(
          AddCounter(registry, "weft_journal_records_total",
                     "Records of the log of --state-dir that are on disk.")),
      sync_seconds(AddHistogram(registry, "weft_journal_sync_seconds",
                                "Duration of one write of the log of "
                                "--state-dir, with its sync.",
                                ExponentialBuckets(0.001, 2, 14))),
      pending_bytes(AddGauge(registry, "weft_journal_pending_bytes",
                             "Bytes of records that wait for the disk of "
                             "--state-dir.")),
      stalled(
          AddGauge(registry, "weft_journal_stalled",
                   "1 while new work is refused because the disk of "
                   "--state-dir is full, short of its reserve or too slow.")),
      set_aside(AddCounter(registry, "weft_steps_set_aside_total",
                           "Steps that are refused because earlier processes "
                           "ended while they ran.")) {}

absl::StatusOr<std::unique_ptr<LogWriter>> LogWriter::Open(
    State* state, uint64_t next_sequence, Options options,
    LogMetrics* metrics) {
  WEFT_ASSIGN_OR_RETURN(std::unique_ptr<LogSink> sink,
                        state->ContinueLog(next_sequence));
  return std::unique_ptr<LogWriter>(
      new LogWriter(state, std::move(sink), next_sequence, options, metrics));
}

LogWriter::LogWriter(const State* state, std::unique_ptr<LogSink> sink,
                     uint64_t next_sequence, Options options,
                     LogMetrics* metrics)
    : state_(state),
      options_(options),
      metrics_(metrics),
      sink_(std::move(sink)),
      last_segment_(next_sequence),
      next_sequence_(next_sequence),
      durable_sequence_(next_sequence),
      thread_([this] { Loop(); }) {}

LogWriter::~LogWriter() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    retry_at_ = {};
  }
  changed_.NotifyAll();
  thread_.join();
}

uint64_t LogWriter::Append(std::string record) {
  uint64_t sequence = 0;
  {
    MutexLock lock(&mu_);
    if (durable_sequence_ == next_sequence_) {
      write_at_ = std::chrono::steady_clock::now() + kMaxIdleTime;
    }
    sequence = next_sequence_++;
    if (!failure_.ok()) return sequence;
    pending_bytes_ += static_cast<int64_t>(record.size());
    records_.push_back(std::move(record));
    SetMetrics();
  }
  changed_.NotifyOne();
  return sequence;
}

void LogWriter::WhenDurable(std::function<void()> task) {
  {
    MutexLock lock(&mu_);
    tasks_.push_back({next_sequence_, std::move(task)});
  }
  changed_.NotifyOne();
}

uint64_t LogWriter::StartSegment() {
  uint64_t sequence = 0;
  {
    MutexLock lock(&mu_);
    sequence = next_sequence_;
    if (last_segment_ == sequence) return sequence;
    last_segment_ = sequence;
    segments_.push_back(sequence);
  }
  changed_.NotifyOne();
  return sequence;
}

uint64_t LogWriter::durable_sequence() const {
  MutexLock lock(&mu_);
  return durable_sequence_;
}

int64_t LogWriter::pending_bytes() const {
  MutexLock lock(&mu_);
  return pending_bytes_;
}

absl::Status LogWriter::stalled() const {
  MutexLock lock(&mu_);
  return StalledLocked();
}

absl::Status LogWriter::failure() const {
  MutexLock lock(&mu_);
  return failure_;
}

absl::Status LogWriter::StalledLocked() const {
  if (!stall_.ok()) return stall_;
  if (pending_bytes_ <= options_.max_pending_bytes) return reserve_;
  return absl::ResourceExhaustedError(absl::StrCat(
      "the disk or the store is slow: more than ", options_.max_pending_bytes,
      " bytes of the log wait for it"));
}

void LogWriter::SetMetrics() {
  metrics_->pending_bytes.Set(static_cast<double>(pending_bytes_));
  metrics_->stalled.Set(StalledLocked().ok() ? 0 : 1);
}

void LogWriter::Loop() {
  pthread_setname_np(pthread_self(), kThreadName);
  for (;;) {
    switch (WaitForWork()) {
      case Work::kCheckRoom:
        CheckRoom();
        break;
      case Work::kBeginSegment:
        NoteResult(BeginSegment());
        break;
      case Work::kWriteGroup:
        TakeGroup();
        NoteResult(WriteGroup());
        break;
      case Work::kRunTask:
        RunTask();
        break;
      case Work::kNone:
      case Work::kStop:
        return;
    }
  }
}

LogWriter::Work LogWriter::WaitForWork() {
  MutexLock lock(&mu_);
  for (;;) {
    const Work work = NextWork();
    if (work != Work::kNone) return work;
    auto until = std::chrono::steady_clock::time_point::max();
    if (failure_.ok()) {
      if (!stall_.ok()) until = retry_at_;
      if (room_may_differ_) until = std::min(until, check_at_);
      if (stall_.ok() && durable_sequence_ < next_sequence_) {
        until = std::min(until, write_at_);
      }
    }
    if (until == std::chrono::steady_clock::time_point::max()) {
      changed_.Wait(&mu_);
    } else {
      changed_.WaitFor(&mu_, until - std::chrono::steady_clock::now());
    }
  }
}

LogWriter::Work LogWriter::NextWork() const {
  const Work idle = stopping_ ? Work::kStop : Work::kNone;
  if (!failure_.ok()) return idle;
  const auto now = std::chrono::steady_clock::now();
  if (room_may_differ_ && !stopping_ && now >= check_at_) {
    return Work::kCheckRoom;
  }
  const bool may_write = stall_.ok() || now >= retry_at_;
  const bool at_boundary =
      !segments_.empty() && segments_.front() == durable_sequence_;
  // If a segment is due, it begins before the next task runs. While the disk is
  // full, the segment waits. Tasks run even then if their records are durable.
  if (at_boundary && may_write) return Work::kBeginSegment;
  if (!tasks_.empty() && tasks_.front().sequence <= durable_sequence_) {
    return Work::kRunTask;
  }
  // A full disk is tried again, because no new work comes until it has room.
  const bool wanted = stopping_ || !tasks_.empty() || !segments_.empty() ||
                      !stall_.ok() || pending_bytes_ > kMaxIdleBytes ||
                      now >= write_at_;
  if (durable_sequence_ < next_sequence_) {
    return may_write && wanted ? Work::kWriteGroup : Work::kNone;
  }
  return at_boundary ? Work::kNone : idle;
}

void LogWriter::CheckRoom() {
  absl::Status room = state_->CheckRoom(options_.disk_reserve_bytes);
  MutexLock lock(&mu_);
  if (!room.ok() && !absl::IsResourceExhausted(room)) {
    // The free room is unknown. Writes go on and report the disk's errors.
    Log(LogLevel::kWarning, "the log's disk does not tell its free room",
        {{"reason", room.message()}});
    room = absl::OkStatus();
  }
  if (room.ok() != reserve_.ok()) {
    Log(room.ok() ? LogLevel::kInfo : LogLevel::kError,
        room.ok() ? "the log's disk has its reserve again"
                  : "the log's disk has less room than its reserve",
        {{"reason", room.message()}});
  }
  reserve_ = room;
  // Other processes may free room, so a disk without its reserve is checked
  // again.
  room_may_differ_ = !room.ok();
  check_at_ = std::chrono::steady_clock::now() +
              absl::ToChronoNanoseconds(options_.retry);
  SetMetrics();
}

void LogWriter::RunTask() {
  std::function<void()> run;
  {
    MutexLock lock(&mu_);
    run = std::move(tasks_.front().run);
    tasks_.pop_front();
  }
  run();
}

absl::Status LogWriter::BeginSegment() {
  uint64_t first = 0;
  {
    MutexLock lock(&mu_);
    first = segments_.front();
  }
  WEFT_RETURN_IF_ERROR(sink_->BeginSegment(first));
  MutexLock lock(&mu_);
  segments_.pop_front();
  return absl::OkStatus();
}

void LogWriter::TakeGroup() {
  if (!group_.empty()) return;
  MutexLock lock(&mu_);
  const uint64_t end = segments_.empty() ? next_sequence_ : segments_.front();
  size_t bytes = 0;
  while (durable_sequence_ + group_.size() < end && bytes < kMaxGroupBytes) {
    bytes += records_.front().size();
    group_.push_back(std::move(records_.front()));
    records_.pop_front();
  }
}

absl::Status LogWriter::WriteGroup() {
  const auto start = std::chrono::steady_clock::now();
  WEFT_ASSIGN_OR_RETURN(const uint64_t bytes,
                        sink_->WriteGroup(durable_sequence(), group_));
  const std::chrono::duration<double> seconds =
      std::chrono::steady_clock::now() - start;
  metrics_->sync_seconds.Observe(seconds.count());
  metrics_->bytes.Increment(static_cast<double>(bytes));
  metrics_->records.Increment(static_cast<double>(group_.size()));
  GroupIsDurable();
  return absl::OkStatus();
}

void LogWriter::GroupIsDurable() {
  int64_t bytes = 0;
  for (const std::string& record : group_) {
    bytes += static_cast<int64_t>(record.size());
  }
  {
    MutexLock lock(&mu_);
    durable_sequence_ += group_.size();
    pending_bytes_ -= bytes;
    room_may_differ_ = options_.disk_reserve_bytes > 0;
  }
  group_.clear();
}

void LogWriter::NoteResult(const absl::Status& status) {
  MutexLock lock(&mu_);
  if (status.ok()) {
    if (!stall_.ok()) Log(LogLevel::kInfo, "the log can be written again");
    stall_ = absl::OkStatus();
  } else if (MayTryAgain(status) && !stopping_) {
    if (stall_.ok()) {
      Log(LogLevel::kError,
          absl::IsResourceExhausted(status) ? "the log's disk is full"
                                            : "the log's store does not answer",
          {{"reason", status.message()}});
    }
    stall_ = absl::IsDeadlineExceeded(status)
                 ? absl::UnavailableError(status.message())
                 : status;
    retry_at_ = std::chrono::steady_clock::now() +
                absl::ToChronoNanoseconds(options_.retry);
  } else {
    Log(LogLevel::kError, "the log cannot be written",
        {{"reason", status.message()},
         {"records", next_sequence_ - durable_sequence_}});
    failure_ = absl::IsAborted(status)
                   ? status
                   : absl::UnavailableError(absl::StrCat(
                         "the log cannot be written: ", status.message()));
    records_.clear();
  }
  SetMetrics();
}

}  // namespace weft::log
