// Records the engine thread's changes of adapters, and the server's notes.
//
// Before Start, the recorder records nothing, and everything counts as durable.
// Start is called only with --state-dir, after the log has been read to its
// end. The log is replayed after Start (Replaying).
//
// The recorder ignores adapters with Durability::kMemory, which have no
// StoredAdapter. A unit that arrives is the log's when it is its own (Own).
//
// Threads: the engine thread, except where a comment says otherwise.
#ifndef WEFT_SRC_LOG_RECORDER_H_
#define WEFT_SRC_LOG_RECORDER_H_

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
#include "src/base/threads/mutex.h"
#include "src/log/log_writer.h"
#include "src/log/record.h"
#include "src/request/step_task.h"

namespace weft::log {

// The cost of replaying the log: bytes to read, and time to read them and on
// the device.
struct ReplayCost {
  uint64_t bytes = 0;
  absl::Duration time;
};

class Recorder {
 public:
  // Starts to record. `cost` is the cost of the existing log, and `read_time`
  // what each later record adds to it. Each SettingsRecord gets `settings`.
  // `adapters` and `notes` are those at the end of the existing log.
  void Start(std::unique_ptr<LogWriter> log, const ReplayCost& cost,
             absl::Duration read_time, std::string settings,
             std::set<AdapterKey> adapters, Notes notes);
  // Writes what is left to disk, runs the tasks of WhenDurable and ends the
  // log's thread. Later records are not written.
  void Stop() ABSL_LOCKS_EXCLUDED(mu_);
  bool recording() const { return log_.load() != nullptr; }

  // While an object of this class lives, the recorder records nothing. The
  // replay holds such an object, because the log already has the changes that
  // the replay makes.
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

  // Returns whether there is a Replaying.
  bool replaying() const { return replaying_ > 0; }

  void Write(const Record& record);
  // Records a micro-batch with gradients that succeeded.
  void Batch(const std::vector<StepSlice>& slices);
  // Records a step that ended with a result or with a StepFailure. Does nothing
  // if the step's adapter was removed.
  void Done(const StepTask& step, const StepResult& result);
  // Records that the request `work` will not complete as it has begun. Does
  // nothing if it has not begun or is complete.
  void Forget(uint64_t work);
  void AddCost(absl::Duration device_time) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the cost of the records since the newest snapshot on disk.
  ReplayCost cost() const ABSL_LOCKS_EXCLUDED(mu_);
  // Record that an arriving unit is this log's, or that one with these adapters
  // has left. So are its notes from then on, or they are gone.
  void Own(const ArrivingRecord& arriving) ABSL_LOCKS_EXCLUDED(mu_);
  void Left(const std::string& unit, const std::vector<AdapterKey>& keys)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Returns whether the log has the adapter (Durability::kStep).
  bool Has(AdapterKey key) const { return adapters_.contains(key); }
  // Returns whether a replay of the log can run a step of `adapter` again that
  // reads the weights of `other`: true if the log has both, or if it does not
  // record the step.
  bool CanReplay(AdapterKey adapter, AdapterKey other) const {
    return !records() || !Has(adapter) || Has(other);
  }
  // Begins a snapshot: sets its notes and its first_sequence. Steps that are
  // accepted meanwhile may be in the snapshot and in the log after it.
  void BeginSnapshot(Snapshot* snapshot) ABSL_LOCKS_EXCLUDED(mu_);
  // Call it when the snapshot is on disk. Subtracts the cost of all records
  // before the snapshot from cost().
  void FinishSnapshot() ABSL_LOCKS_EXCLUDED(mu_);

  // Any thread may call the methods below.

  // Records that a step is accepted, before it can begin. `bytes` are its
  // AcceptedRecord without `work` and `key`. Does nothing before Start and
  // after Stop.
  void Accept(uint64_t work, AdapterKey key, std::string bytes)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Records a note (NoteRecord). Does nothing before Start and after Stop, and
  // for a note of a unit that is held or has left: then PutNote returns false.
  bool PutNote(const std::string& name,
               std::shared_ptr<const std::string> value)
      ABSL_LOCKS_EXCLUDED(mu_);
  bool PutNote(const std::string& name, std::string value)
      ABSL_LOCKS_EXCLUDED(mu_) {
    return PutNote(name, std::make_shared<const std::string>(std::move(value)));
  }
  void EraseNote(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the notes whose names begin with `prefix`.
  Notes NotesWith(const std::string& prefix) const ABSL_LOCKS_EXCLUDED(mu_);
  // From now on no note of this unit changes, or may change again.
  void HoldNotes(const std::string& unit) ABSL_LOCKS_EXCLUDED(mu_);
  void ReleaseNotes(const std::string& unit) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the notes of a unit.
  std::vector<NoteRecord> NotesOf(const std::string& unit) const
      ABSL_LOCKS_EXCLUDED(mu_);
  bool HasNotes(const std::string& unit) const ABSL_LOCKS_EXCLUDED(mu_);
  // Returns a unit that has notes; empty if there is none.
  std::string UnitWithNotes() const ABSL_LOCKS_EXCLUDED(mu_);

  // Returns the image files that are named in a record since the last
  // BeginSnapshot or will be named in a later record. Leaves out files that are
  // named only in the snapshot.
  std::set<std::string> Images() const ABSL_LOCKS_EXCLUDED(mu_);
  // Adds a file to Images(). `recorded` says whether a record already names the
  // file; otherwise a later record will.
  void AddImage(const std::string& name, bool recorded)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Removes a file from Images(), because no record will name it.
  void DropImage(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs `task` when all earlier records are on disk. Tasks run in order, on
  // the log's thread. Before Start and after Stop, runs `task` at once on the
  // caller's thread.
  void WhenDurable(std::function<void()> task);
  // Returns RESOURCE_EXHAUSTED (STATE_DISK_FULL) while the disk is full or has
  // less room than disk_reserve_bytes, or while too many bytes wait for the
  // disk, and UNAVAILABLE (STATE_STORE_UNREACHABLE) while the store does not
  // answer. The server then refuses new work.
  absl::Status CheckRoom() const;
  // Returns UNAVAILABLE after a final error of the log, which then takes no
  // more records.
  absl::Status failure() const;

 private:
  // Appends an encoded record.
  void Append(std::string bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void AppendLocked(std::string bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Calls visit(name, value) for each note of the unit until it returns false.
  template <typename Visit>
  void VisitNotes(const std::string& unit, const Visit& visit) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool records() const { return recording() && replaying_ == 0; }

  std::unique_ptr<LogWriter> owned_;
  std::atomic<LogWriter*> log_{nullptr};
  std::string settings_;
  int replaying_ = 0;         // Number of objects of class Replaying.
  std::set<uint64_t> begun_;  // Requests that have begun and not completed.
  std::set<AdapterKey> adapters_;  // The adapters that the log has.
  mutable Mutex mu_;
  ReplayCost cost_ ABSL_GUARDED_BY(mu_);
  absl::Duration read_time_ ABSL_GUARDED_BY(mu_);
  // The cost when the running snapshot began.
  ReplayCost before_snapshot_ ABSL_GUARDED_BY(mu_);
  Notes notes_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> held_ ABSL_GUARDED_BY(mu_);  // Units of HoldNotes.
  // Units that have left, and not come back.
  std::set<std::string> left_ ABSL_GUARDED_BY(mu_);
  // Maps an image file to whether a record names it already.
  std::map<std::string, bool> images_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_RECORDER_H_
