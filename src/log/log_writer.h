// Appends records to the log of a state. The writer's own thread writes them.
// It writes waiting records in groups (group commit), one group at a time.
//
// While the disk is full or the object store does not answer, the log is
// stalled: records and tasks wait, and the writer tries again until it
// succeeds. The log counts as stalled as soon as the disk has less room than
// its reserve, so that callers stop before the disk is full. Any other error is
// final. Then only the next start can tell what is on disk.
//
// Threads: any. Tasks run on the log's thread and must be short, because the
// next group waits for them.
#ifndef WEFT_SRC_LOG_LOG_WRITER_H_
#define WEFT_SRC_LOG_LOG_WRITER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/observe/metrics.h"
#include "src/base/threads/mutex.h"
#include "src/log/state.h"

namespace weft::log {

struct LogMetrics {
  explicit LogMetrics(prometheus::Registry* registry);

  prometheus::Counter& bytes;
  prometheus::Counter& records;
  prometheus::Histogram& sync_seconds;
  prometheus::Gauge& pending_bytes;
  prometheus::Gauge& stalled;
  prometheus::Counter& set_aside;
};

class LogWriter {
 public:
  struct Options {
    // If more bytes than this wait for the disk, the log counts as stalled.
    // Append still takes records, but callers check stalled() before they
    // accept new work.
    int64_t max_pending_bytes = 256 << 20;
    // If fewer bytes than this are free on the disk, the log counts as stalled,
    // but writes go on.
    uint64_t disk_reserve_bytes = 0;
    // Time between two attempts to write to a full disk, and between two checks
    // of the disk's free bytes.
    absl::Duration retry = absl::Seconds(1);
  };

  // Begins a segment at `next_sequence`. The caller gets `next_sequence` from
  // LogReader at the log's end, after Repair(). `folder` and `metrics` outlive
  // the writer. Errors: FAILED_PRECONDITION if the log does not end just before
  // `next_sequence` or has a torn tail, and those of state_folder.h.
  static absl::StatusOr<std::unique_ptr<LogWriter>> Open(State* state,
                                                         uint64_t next_sequence,
                                                         Options options,
                                                         LogMetrics* metrics);
  // Writes and syncs all appended records and runs the tasks. If a write or
  // sync fails, even because the disk is full, drops the records and tasks that
  // wait.
  ~LogWriter();
  LogWriter(const LogWriter&) = delete;
  LogWriter& operator=(const LogWriter&) = delete;

  // Queues the record and returns its sequence. Sequences are consecutive.
  // Never waits for the disk. A record goes to disk with the next task, or
  // within seconds. Records are in the log in the order of calls. After a final
  // error, drops the record.
  uint64_t Append(std::string record);

  // Runs `task` when all records appended before this call are on disk. Tasks
  // run in the order of calls. After a final error no task runs.
  void WhenDurable(std::function<void()> task);

  // Makes the next record begin a new segment, which is a file of the log.
  // Returns the sequence of that record.
  uint64_t StartSegment();

  // Returns the sequence of the first record that may not be on disk yet.
  uint64_t durable_sequence() const;
  // Returns the bytes of records that may not be on disk yet.
  int64_t pending_bytes() const;

  // Returns RESOURCE_EXHAUSTED, with the reason, while the log is stalled: the
  // disk is full or has less room than the reserve, or too many bytes wait for
  // the disk. Returns UNAVAILABLE while the object store does not answer.
  absl::Status stalled() const;
  // Returns UNAVAILABLE after a final error; ABORTED if another process has
  // taken the log over. The process must then end.
  absl::Status failure() const;

 private:
  struct Task {
    uint64_t sequence;  // The task runs when all records with lower numbers are
                        // on disk.
    std::function<void()> run;
  };
  // What the log's thread does next.
  enum class Work {
    kNone,
    kStop,
    kCheckRoom,
    kBeginSegment,
    kRunTask,
    kWriteGroup
  };

  LogWriter(const State* state, std::unique_ptr<LogSink> sink,
            uint64_t next_sequence, Options options, LogMetrics* metrics);

  void Loop();
  Work NextWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Work WaitForWork();
  void CheckRoom();
  void RunTask();
  absl::Status BeginSegment();
  // Moves records that wait into `group_`. Does nothing if `group_` still holds
  // a group whose write stalled.
  void TakeGroup();
  absl::Status WriteGroup();
  void GroupIsDurable();
  // Stores whether an attempt to write succeeded, stalled or failed for good.
  void NoteResult(const absl::Status& status);
  void SetMetrics() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status StalledLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const State* const state_;
  const Options options_;
  LogMetrics* const metrics_;

  // Only the log's thread uses these: where groups go, and the group
  // that is being written.
  const std::unique_ptr<LogSink> sink_;
  std::vector<std::string> group_;

  mutable Mutex mu_;
  CondVar changed_;
  std::deque<std::string> records_ ABSL_GUARDED_BY(mu_);
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mu_);
  // First sequences of segments that will begin.
  std::deque<uint64_t> segments_ ABSL_GUARDED_BY(mu_);
  // First sequence of the latest segment, which may not have begun.
  uint64_t last_segment_ ABSL_GUARDED_BY(mu_);
  uint64_t next_sequence_ ABSL_GUARDED_BY(mu_);
  uint64_t durable_sequence_ ABSL_GUARDED_BY(mu_);
  int64_t pending_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  // Records that wait are written then, even if nobody waits for them.
  std::chrono::steady_clock::time_point write_at_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  // The result of the last check of the free bytes: RESOURCE_EXHAUSTED if the
  // disk lacked its reserve, otherwise OK.
  absl::Status reserve_ ABSL_GUARDED_BY(mu_);
  // The free bytes need another check, at `check_at_` or later.
  bool room_may_differ_ ABSL_GUARDED_BY(mu_) = true;
  std::chrono::steady_clock::time_point check_at_ ABSL_GUARDED_BY(mu_);
  absl::Status stall_ ABSL_GUARDED_BY(mu_);
  std::chrono::steady_clock::time_point retry_at_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_LOG_WRITER_H_
