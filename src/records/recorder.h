// Writes down what the engine thread does to adapters, as it does it.
//
// Until Start nothing is recorded and everything counts as durable: without
// --state-dir for ever, with it while the log is run again.
//
// Threads: the engine thread, unless a group of functions says "Any thread".
#ifndef WEFT_SRC_RECORDS_RECORDER_H_
#define WEFT_SRC_RECORDS_RECORDER_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/mutex.h"
#include "src/dispatch/work.h"
#include "src/journal/log_writer.h"
#include "src/records/record.h"

namespace weft::records {

// What a start has to do again: bytes of the log to read, and device time.
struct ReplayCost {
  uint64_t bytes = 0;
  absl::Duration time;
};

class Recorder {
 public:
  // Records from now on. `cost`: of the log that is there already. `settings`:
  // SettingsRecord.
  void Start(std::unique_ptr<journal::LogWriter> log, const ReplayCost& cost,
             std::string settings);
  [[nodiscard]] bool recording() const { return log_.load() != nullptr; }

  void Write(const Record& record);
  // A micro-batch with gradients that has succeeded.
  void Batch(const dispatch::RunTrain& train);
  // A step that has ended without an error, or with a StepFailure. Its adapter
  // may be gone by now.
  void Done(const dispatch::StepTask& step, const StepResult& result);
  // The request was given up, perhaps between two slices.
  void Forget(uint64_t work);
  void AddCost(absl::Duration device_time) { cost_.time += device_time; }
  // Since the newest snapshot on disk.
  [[nodiscard]] const ReplayCost& cost() const { return cost_; }
  // A snapshot begins: returns the first sequence that it does not contain.
  [[nodiscard]] uint64_t BeginSnapshot();
  // The snapshot is on disk.
  void FinishSnapshot();

  // Any thread.

  // A name for an image file that no other has had.
  [[nodiscard]] std::string NewImageName();
  // The image files that the log names, or is about to, from the latest
  // snapshot on.
  [[nodiscard]] std::set<std::string> Images() const ABSL_LOCKS_EXCLUDED(mu_);
  // The log names the file, or a record that is about to be written does.
  void AddImage(const std::string& name, bool recorded)
      ABSL_LOCKS_EXCLUDED(mu_);
  // No record will name the file.
  void DropImage(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `task` when all that was recorded is on disk, in order; its thread is
  // the log's, or the caller's.
  void WhenDurable(std::function<void()> task);
  // RESOURCE_EXHAUSTED while the disk is full: no new work then.
  [[nodiscard]] absl::Status CheckRoom() const;
  // UNAVAILABLE once nothing can be recorded any more.
  [[nodiscard]] absl::Status failure() const;

 private:
  void Append(std::string bytes);

  std::unique_ptr<journal::LogWriter> owned_;
  std::atomic<journal::LogWriter*> log_{nullptr};
  std::string settings_;
  std::set<uint64_t> begun_;  // Requests with a BeginRecord, not done.
  ReplayCost cost_;
  ReplayCost before_snapshot_;  // What the snapshot under way will save.
  std::atomic<uint64_t> num_images_{0};
  mutable Mutex mu_;
  // By name; true once a record names it.
  std::map<std::string, bool> images_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::records

#endif  // WEFT_SRC_RECORDS_RECORDER_H_
