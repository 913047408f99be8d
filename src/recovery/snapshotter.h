// Writes all adapters to the state folder now and then, so that the log that a
// start has to run again stays short, and cuts the log.
//
// A snapshot is of one moment: the log begins a new segment, and each adapter
// that changed since its last image is copied as it was then. It is copied when
// it is its turn, or just before it changes (BeforeChange), whichever is first;
// so the engine goes on meanwhile. The I/O thread writes the copies.
//
// Threads: engine thread; files by the I/O thread.
#ifndef WEFT_SRC_RECOVERY_SNAPSHOTTER_H_
#define WEFT_SRC_RECOVERY_SNAPSHOTTER_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/adapters/engine_context.h"
#include "src/base/mutex.h"
#include "src/files/spill_folder.h"
#include "src/journal/state_folder.h"
#include "src/records/record.h"

namespace weft::engine {

class Snapshotter {
 public:
  // All outlive it. `folder` may be null: then nothing is ever written.
  Snapshotter(const EngineContext* context, journal::StateFolder* folder,
              const SpillFolder* spill)
      : context_(*context), folder_(folder), spill_(*spill) {}

  // An adapter that was read from the newest snapshot.
  void Restored(AdapterKey key, const records::ImageRecord& image) {
    images_[key] = image;
  }
  // The adapter is about to change.
  void BeforeChange(AdapterKey key);
  // Between two pieces of work: begins a snapshot that is due, or goes on with
  // the one under way.
  void GoOn();
  // At the end of a process that has drained: writes a snapshot if running the
  // log again would take longer than that. Returns when it is on disk, or has
  // failed, which is logged.
  void WriteLast();

 private:
  [[nodiscard]] bool IsDue() const;
  // Bytes of the adapters that have changed since their images.
  [[nodiscard]] uint64_t ChangedBytes() const;
  void Begin();
  // What the adapter is, without its image.
  [[nodiscard]] records::AdapterRecord Describe(AdapterKey key) const;
  [[nodiscard]] records::ImageRecord RecordOf(
      AdapterKey key, const std::string& file,
      const lora::AdapterImage& image) const;
  // Copies the adapter and has the copy written.
  void Copy(AdapterKey key);
  // I/O thread: writes the copy, whose tensors may be in a spill file.
  [[nodiscard]] absl::Status Write(const std::string& name, int64_t size,
                                   lora::AdapterImage& image,
                                   const ImageFile& spilled) const;
  void Finish();
  // The snapshot under way failed.
  void GiveUp(const absl::Status& status);

  const EngineContext& context_;
  journal::StateFolder* const folder_;
  const SpillFolder& spill_;

  // The latest image of each adapter that has not changed since that image.
  std::map<AdapterKey, records::ImageRecord> images_;
  enum class Phase : uint8_t { kIdle, kCopying, kWriting };
  Phase phase_ = Phase::kIdle;
  absl::Time not_before_;        // When a snapshot failed: none before this.
  uint64_t first_sequence_ = 0;  // The first record it does not contain.
  std::map<AdapterKey, records::AdapterRecord> adapters_;  // As they were then.
  records::Snapshot snapshot_;
  std::set<AdapterKey> pending_;         // To be copied.
  std::vector<std::string> new_images_;  // Copies that it has made.

  Mutex mu_;
  CondVar written_;
  uint64_t bytes_in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  int files_in_flight_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

}  // namespace weft::engine

#endif  // WEFT_SRC_RECOVERY_SNAPSHOTTER_H_
