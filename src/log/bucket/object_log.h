// Reads and writes the log in an object store.
#ifndef WEFT_SRC_LOG_BUCKET_OBJECT_LOG_H_
#define WEFT_SRC_LOG_BUCKET_OBJECT_LOG_H_

#include <cstdint>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/base/threads/mutex.h"
#include "src/log/bucket/log_object.h"
#include "src/log/bucket/log_owner.h"
#include "src/log/state.h"
#include "src/store/object_store.h"

namespace weft::log {

// Reads the objects of the log from a place on, some of them ahead. Skips seals
// and objects of an earlier owner than one before. Threads: one at a time.
class ObjectLogReader : public LogReader {
 public:
  // The log goes on with record `first_sequence` at `first_place`. `store`
  // outlives the reader.
  static absl::StatusOr<std::unique_ptr<ObjectLogReader>> Open(
      store::ObjectStore* store, const LogKeys& keys, uint64_t first_place,
      uint64_t first_sequence);
  ~ObjectLogReader() override;

  absl::StatusOr<std::optional<Record>> Next() override;
  bool IsReady(absl::Duration patience) override;
  uint64_t next_sequence() const override { return next_sequence_; }
  uint64_t torn_bytes() const override { return 0; }
  absl::Status Repair() override { return absl::OkStatus(); }
  uint64_t total_bytes() const override { return total_bytes_; }
  uint64_t read_bytes() const override { return read_bytes_; }

 private:
  // An object with the bytes that were read for it.
  using Coming = std::future<absl::StatusOr<std::pair<LogObject, uint64_t>>>;

  ObjectLogReader(store::ObjectStore* store, uint64_t first_sequence)
      : store_(*store), next_sequence_(first_sequence) {}

  absl::Status List(const LogKeys& keys, uint64_t first_place);
  void ReadAhead();
  // Reads again what is or was read ahead, when it is asked for.
  void ForgetComing();
  // Reads the next object, whose records Next then returns.
  absl::Status ReadObject();

  store::ObjectStore& store_;
  std::vector<store::ListedObject> objects_;
  size_t asked_ = 0;               // Objects that are or were read ahead.
  size_t read_ = 0;                // Objects that ReadObject has read.
  std::deque<Coming> coming_;      // Those from `read_` to `asked_`.
  std::vector<Coming> forgotten_;  // Their destructors wait for the store.
  LogObject object_;
  size_t next_in_object_ = 0;
  uint64_t epoch_ = 0;  // The highest so far.
  uint64_t next_sequence_;
  uint64_t total_bytes_ = 0;
  uint64_t read_bytes_ = 0;
};

// Where the parts of the log begin. Threads: any.
class SegmentPlaces {
 public:
  void Add(uint64_t first_sequence, uint64_t place) ABSL_LOCKS_EXCLUDED(mu_);
  // Waits until the segment has begun, so all records before it are durable,
  // and returns its place. Forgets the segments before it. Errors: UNAVAILABLE
  // if it has not begun after `timeout`.
  absl::StatusOr<uint64_t> Wait(uint64_t first_sequence, absl::Duration timeout)
      ABSL_LOCKS_EXCLUDED(mu_);

 private:
  Mutex mu_;
  CondVar added_;
  std::map<uint64_t, uint64_t> places_ ABSL_GUARDED_BY(mu_);
};

// Writes each group of records as one object. Threads: one at a time.
class ObjectLogWriter : public LogSink {
 public:
  // The pointers outlive the writer. Errors of the functions: those of
  // State::ContinueLog.
  ObjectLogWriter(store::ObjectStore* store, LogOwner* owner,
                  SegmentPlaces* places,
                  uint64_t max_object_bytes = store::kMaxAtomicBytes)
      : max_object_bytes_(max_object_bytes),
        store_(*store),
        owner_(*owner),
        places_(*places),
        next_place_(owner->first_place()) {}

  absl::Status BeginSegment(uint64_t first_sequence) override;
  absl::StatusOr<uint64_t> WriteGroup(
      uint64_t first_sequence,
      const std::vector<std::string>& records) override;

 private:
  // Returns what the log gets for a group of these bytes. Writes a group that
  // is too large first, as an object with its epoch and first sequence in its
  // name, such as e3-17.
  absl::StatusOr<std::string> PlaceGroup(uint64_t first_sequence,
                                         std::string group);
  // Returns whether the object at the next place is `bytes`; false if it is the
  // late seal of an earlier owner. Errors: ABORTED if a later owner has it.
  absl::StatusOr<bool> IsWritten(const std::string& bytes);

  const uint64_t max_object_bytes_;
  store::ObjectStore& store_;
  LogOwner& owner_;
  SegmentPlaces& places_;
  uint64_t next_place_;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_BUCKET_OBJECT_LOG_H_
