// Records the engine thread's changes of adapters.
//
// Before Start, nothing is recorded and everything counts as durable. Without
// --state-dir Start is never called. With it, Start is called when the log has
// been read to its end, and the replay of the log follows (Replaying).
//
// The recorder knows the adapters that have an AdapterRecord, and ignores all
// others: those of durability memory. It leaves out the steps of those of
// durability checkpoint.
//
// Threads: the engine thread, except where a comment says otherwise.
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
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/mutex.h"
#include "src/dispatch/work.h"
#include "src/journal/log_writer.h"
#include "src/records/record.h"
#include "src/records/restore_points.h"

namespace weft::records {

// The cost of replaying the log: bytes to read, and device time.
struct ReplayCost {
  uint64_t bytes = 0;
  absl::Duration time;
};

// For each adapter, its mark on the next record (record.h), with its name.
using Marks = std::map<AdapterKey, Mark>;

class Recorder {
 public:
  // Starts to record. `cost` is the cost of the existing log. `settings` go
  // into each SettingsRecord. `marks` are those of all adapters at the end of
  // the existing log, and `restores` those of durability checkpoint.
  void Start(std::unique_ptr<journal::LogWriter> log, const ReplayCost& cost,
             std::string settings, Marks marks, RestorePoints restores);
  [[nodiscard]] bool recording() const { return log_.load() != nullptr; }

  // While an object of this class lives, no change is recorded, because the log
  // has the changes that are made.
  class Replaying {
   public:
    explicit Replaying(Recorder* recorder) : depth_(recorder->replaying_) {
      ++depth_;
    }
    ~Replaying() { --depth_; }
    Replaying(const Replaying&) = delete;
    Replaying& operator=(const Replaying&) = delete;

   private:
    int& depth_;
  };

  void Write(const Record& record);
  // Records a micro-batch with gradients that succeeded.
  void Batch(const dispatch::RunTrain& train);
  // Records a step that ended without an error or with a StepFailure. Its
  // adapter may be gone.
  void Done(const dispatch::StepTask& step, const StepResult& result);
  // Records that the request was given up, possibly between two slices.
  void Forget(uint64_t work);
  void AddCost(absl::Duration device_time) { cost_.time += device_time; }
  // Returns the cost of the log since the newest snapshot on disk.
  [[nodiscard]] const ReplayCost& cost() const { return cost_; }
  // Returns whether the log has the adapter's steps.
  [[nodiscard]] bool HasSteps(AdapterKey key) const;
  [[nodiscard]] const RestorePoints& restores() const { return restores_; }
  // Begins a snapshot. Returns the sequence of the first record that the
  // snapshot does not contain.
  [[nodiscard]] uint64_t BeginSnapshot();
  // Call it when the snapshot is on disk.
  void FinishSnapshot();

  // Any thread may call the methods below.

  // Returns a new name for an image file.
  [[nodiscard]] std::string NewImageName();
  // Returns the image files that the latest snapshot, the log since then, or an
  // unwritten record names.
  [[nodiscard]] std::set<std::string> Images() const ABSL_LOCKS_EXCLUDED(mu_);
  // Adds a file that the log names or, if not `recorded`, that a record will
  // name.
  void AddImage(const std::string& name, bool recorded)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Removes a file that no record will name.
  void DropImage(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `task` when all earlier records are on disk. Tasks run in order, on
  // the log's thread or, if nothing is recorded, in the caller.
  void WhenDurable(std::function<void()> task);
  // Returns RESOURCE_EXHAUSTED while the disk is full, has less room than the
  // reserve, or too many bytes wait for it. New work is then refused.
  [[nodiscard]] absl::Status CheckRoom() const;
  // Returns UNAVAILABLE if nothing can be recorded any more.
  [[nodiscard]] absl::Status failure() const;

 private:
  // Appends a record that changes these adapters, with its trail.
  void Append(std::string bytes, const std::set<AdapterKey>& keys);
  [[nodiscard]] bool records() const { return recording() && replaying_ == 0; }
  [[nodiscard]] bool CensusIsDue() const;
  [[nodiscard]] std::vector<Mark> Census() const;

  std::unique_ptr<journal::LogWriter> owned_;
  std::atomic<journal::LogWriter*> log_{nullptr};
  std::string settings_;
  int replaying_ = 0;         // Number of objects of class Replaying.
  std::set<uint64_t> begun_;  // Requests that have begun and not completed.
  Marks marks_;
  RestorePoints restores_;
  uint64_t since_census_ = 0;  // Records since the last census.
  absl::Time census_at_ = absl::InfinitePast();
  ReplayCost cost_;
  ReplayCost before_snapshot_;  // The cost when the running snapshot began.
  std::atomic<uint64_t> num_images_{0};
  mutable Mutex mu_;
  // Maps a file to whether a record names it.
  std::map<std::string, bool> images_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::records

#endif  // WEFT_SRC_RECORDS_RECORDER_H_
