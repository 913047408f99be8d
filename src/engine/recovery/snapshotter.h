// Writes snapshots to the state folder and then cuts the log, so that a start
// replays only a short log.
//
// A snapshot holds the state of all adapters of the log at one moment. At this
// moment the log begins a new segment (file). If an adapter has changed since
// its last image, it is copied when its turn comes, or just before it changes
// again (BeforeChange). So the engine keeps working during a snapshot.
//
// Threads: engine thread. The I/O thread writes the copies.
#ifndef WEFT_SRC_ENGINE_RECOVERY_SNAPSHOTTER_H_
#define WEFT_SRC_ENGINE_RECOVERY_SNAPSHOTTER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/files/spill_folder.h"
#include "src/base/threads/mutex.h"
#include "src/engine/adapters/adapter_table.h"
#include "src/engine/engine_context.h"
#include "src/log/record.h"
#include "src/request/reply.h"

namespace weft::engine {

// The speed of a local disk, as WorthLastSnapshot assumes it, and of a store of
// which no write was measured.
inline constexpr double kDiskBytesPerSecond = 200e6;
inline constexpr double kStoreBytesPerSecond = 50e6;

// Returns true if a process that is about to end should write a snapshot of
// `bytes` bytes. Without this snapshot, the next start replays the log for the
// time `replay`. The snapshot is worthwhile if the write is faster than the
// replay, or if the replay is long and the write ends before a supervisor would
// kill the process.
bool WorthLastSnapshot(absl::Duration replay, uint64_t bytes,
                       double bytes_per_second = kDiskBytesPerSecond);

class Snapshotter {
 public:
  // The arguments outlive the snapshotter. Without a state nothing is written.
  Snapshotter(const EngineContext* context, const SpillFolder* spill)
      : context_(*context), spill_(*spill) {}

  // Notes that an adapter was restored from an image, so that the next snapshot
  // uses this image unless the adapter has changed.
  void Restored(AdapterKey key, const log::ImageRecord& image) {
    images_[key] = image;
  }
  // Copies the adapter if the running snapshot still needs its present state.
  // Call it before the adapter changes or is removed.
  void BeforeChange(AdapterKey key);
  // An adapter's record, with an image of its present state.
  struct Described {
    log::StoredAdapter adapter;
    bool is_new = false;  // Only this record names the image (DropState).
  };
  // Gives `done` the adapter's record on the engine thread, when the image is
  // in the state. The adapter must not change before. Errors: those of copying
  // and of writing images. `done` does not run if the engine ends first.
  void DescribeNow(AdapterKey key,
                   std::function<void(absl::StatusOr<Described>)> done);
  // While adapters are on their way to or from other logs, no snapshot begins,
  // so none has half of a move.
  void set_moving(bool moving) { moving_ = moving; }
  // Call it between two pieces of work. Continues the running snapshot. If no
  // snapshot runs but one is due, begins it, unless a training request is
  // between slices.
  void GoOn();
  // Returns whether a snapshot runs: GoOn has something to do soon.
  bool running() const { return phase_ != Phase::kIdle; }
  // Has a snapshot begin soon, even if none is due. Runs `done` on the reply
  // thread when it is on disk or has failed.
  void Request(Callback<bool> done) { requests_.push_back(std::move(done)); }
  // Ends all requests with an error. Call it after the last GoOn.
  void EndRequests(const absl::Status& status);
  // Call it after a drain, before the process ends. Completes the running
  // snapshot. If no snapshot runs, writes one if it is worthwhile
  // (WorthLastSnapshot). Returns when the snapshot is on disk or has failed;
  // logs a failure.
  void WriteLast();

 private:
  bool IsDue() const;
  // Returns the adapters that the log has.
  std::vector<AdapterKey> LoggedKeys() const;
  // Returns the bytes that the next snapshot must copy.
  uint64_t ChangedBytes() const;
  void Begin();
  void PlanNextForRoom();
  // Continues the running snapshot until it has ended.
  void RunToEnd();
  // Returns the adapter's record without its image.
  log::StoredAdapter Describe(AdapterKey key) const;
  log::ImageRecord RecordOf(AdapterKey key, const std::string& file,
                            const lora::AdapterImage& image) const;
  // Returns the speed at which a last snapshot would be written.
  double BytesPerSecond() ABSL_LOCKS_EXCLUDED(mu_);
  // Waits while too many bytes are being written. Returns false, and counts
  // none, if the snapshot has failed, or the store does not answer, so that it
  // will fail.
  bool CountBytes(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  // An adapter's state, or why it could not be copied.
  struct Copied {
    log::ImageRecord record;
    int64_t size = 0;  // Floats of each tensor.
    ImageFile spilled;
    absl::Status status;
    lora::AdapterImage image;
  };
  Copied CopyOf(AdapterKey key) const;
  // Copies the adapter and posts the write of the copy.
  void Copy(AdapterKey key);
  // Writes the copy as an image file. If the adapter's tensors are in a spill
  // file, reads them from there first. Threads: the I/O thread.
  absl::Status Write(Copied& copy) ABSL_LOCKS_EXCLUDED(mu_);
  void Finish();
  // Ends the requests of the running snapshot.
  void Answer(const absl::StatusOr<bool>& result);
  // Abandons the running snapshot after an error.
  void GiveUp(const absl::Status& status);

  const EngineContext& context_;
  const SpillFolder& spill_;

  // The latest image of each adapter that has not changed since this image was
  // made.
  std::map<AdapterKey, log::ImageRecord> images_;
  std::vector<Callback<bool>> requests_;  // For the next snapshot.
  std::vector<Callback<bool>> served_;    // For the running one.
  enum class Phase : uint8_t { kIdle, kCopying, kWriting };
  Phase phase_ = Phase::kIdle;
  bool moving_ = false;
  absl::Time not_before_;  // No snapshot begins before this time.
  // The same for snapshots that are only to make room, and the pause after the
  // next of them. A log that has just been cut gives hardly any room, so the
  // pause grows as long as room is short.
  absl::Time no_room_before_;
  absl::Duration room_pause_;
  // The log's adapters, as of the moment of the snapshot.
  std::map<AdapterKey, log::StoredAdapter> adapters_;
  log::Snapshot snapshot_;
  std::set<AdapterKey> pending_;         // Adapters that are not copied yet.
  std::vector<std::string> new_images_;  // Images of this snapshot.

  Mutex mu_;
  CondVar written_;
  uint64_t bytes_in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  int files_in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  // These two are totals over all images that were written.
  uint64_t written_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Duration writing_time_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::engine

#endif  // WEFT_SRC_ENGINE_RECOVERY_SNAPSHOTTER_H_
