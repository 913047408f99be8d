// Where the state of a server is kept: the log, snapshots and images. It is a
// folder (folder/state_folder.h) or a part of an object store
// (bucket/state_bucket.h). One process at a time writes it.
//
// Errors of all functions: those of file_io.h or of object_store.h, and those
// that the comment of a function names. UNAVAILABLE and DEADLINE_EXCEEDED mean
// that the store does not answer. ABORTED means that another process has taken
// the state over; then this one must end.
// Threads: only one thread at a time may call ReadSnapshot, WriteSnapshot or
// Cut, or a reader or a writer of the log. Any thread may call the other
// functions. All that return a status block on the disk or on the store.
#ifndef WEFT_SRC_LOG_STATE_H_
#define WEFT_SRC_LOG_STATE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace weft::log {

// Reads the records of a log in their order. Next returns DATA_LOSS for what is
// damaged or missing.
class LogReader {
 public:
  struct Record {
    uint64_t sequence = 0;
    std::string bytes;
  };
  virtual ~LogReader() = default;

  // Returns the next record; none at the end of the log. After UNAVAILABLE or
  // DEADLINE_EXCEEDED the caller may try again.
  virtual absl::StatusOr<std::optional<Record>> Next() = 0;

  // Waits at most for `patience`. Returns whether Next has what it needs from a
  // store.
  virtual bool IsReady(absl::Duration /*patience*/) { return true; }

  // Returns the sequence after the last record that Next has returned. Before
  // the first record, returns the first sequence to read. At the end of the
  // log, the result is the sequence of the next record to write.
  virtual uint64_t next_sequence() const = 0;

  // Returns the number of bytes of records that a crash left incomplete at the
  // log's end. Call it when Next has returned none.
  virtual uint64_t torn_bytes() const = 0;
  // Removes these bytes durably. REQUIRES: Next has returned none.
  virtual absl::Status Repair() = 0;

  // For a progress bar: the number of bytes to read, and the number read so
  // far.
  virtual uint64_t total_bytes() const = 0;
  virtual uint64_t read_bytes() const = 0;
};

// Where LogWriter puts groups of records. After RESOURCE_EXHAUSTED,
// UNAVAILABLE or DEADLINE_EXCEEDED the caller may try the same call again,
// until it succeeds. Any other error is final.
class LogSink {
 public:
  virtual ~LogSink() = default;

  // Begins a part of the log with record `first_sequence`. Cut removes the log
  // in such parts.
  virtual absl::Status BeginSegment(uint64_t first_sequence) = 0;

  // Writes a group of consecutive records, durably on success. Returns the
  // bytes written.
  virtual absl::StatusOr<uint64_t> WriteGroup(
      uint64_t first_sequence, const std::vector<std::string>& records) = 0;
};

// An image's bytes, which never change. Threads: one at a time.
class ImageReader {
 public:
  virtual ~ImageReader() = default;

  // Reads until `bytes` is full or the image ends. Returns the number of bytes
  // read.
  virtual absl::StatusOr<size_t> Read(uint64_t offset,
                                      std::span<char> bytes) = 0;
  virtual absl::StatusOr<uint64_t> Size() = 0;
};

struct SnapshotFile {
  // The sequence of the first record that the snapshot does not contain.
  uint64_t next_sequence = 0;
  std::string bytes;
};

class State {
 public:
  virtual ~State() = default;

  // Returns the line that identifies the base model. Does not block.
  virtual const std::string& model() const = 0;
  // Returns ABORTED when another process has taken the state over. Does not
  // block.
  virtual absl::Status failure() const { return absl::OkStatus(); }
  // Returns false while a store does not answer, as far as is known. Then the
  // functions for images fail at once. Does not block.
  virtual bool answers() const { return true; }
  // Says that this process writes no more, so that another may begin at once;
  // if `drained`, that none is to begin.
  virtual absl::Status Release(bool /*drained*/) { return absl::OkStatus(); }

  // Opens the log for reading from record `first_sequence`, which begins the
  // log or follows the newest snapshot. The state outlives the reader.
  virtual absl::StatusOr<std::unique_ptr<LogReader>> OpenLog(
      uint64_t first_sequence) const = 0;

  // Goes on with the log at `next_sequence`, which a reader has returned at the
  // log's end, after Repair(). The state outlives the sink. Errors:
  // FAILED_PRECONDITION if the log does not end just before `next_sequence` or
  // has a torn tail.
  virtual absl::StatusOr<std::unique_ptr<LogSink>> ContinueLog(
      uint64_t next_sequence) = 0;

  // Returns about how long a start takes to read a record. Does not block.
  virtual absl::Duration ReadTime() const { return absl::ZeroDuration(); }

  // Returns RESOURCE_EXHAUSTED if fewer than `reserve` bytes are free. Other
  // errors: those of ReadDiskRoom (disk_room.h).
  virtual absl::Status CheckRoom(uint64_t reserve) const = 0;

  // Returns the newest snapshot, or none if there is none. Errors: DATA_LOSS.
  virtual absl::StatusOr<std::optional<SnapshotFile>> ReadSnapshot() const = 0;

  // Writes a snapshot durably, as the newest one. The caller may then call Cut.
  // Errors: FAILED_PRECONDITION if another snapshot contains more records.
  virtual absl::Status WriteSnapshot(const SnapshotFile& snapshot) = 0;

  // Removes parts of the log that hold only records before `next_sequence` (but
  // not the last part), all snapshots but the newest, and images not in
  // `keep_images`. No image may be written during the call. After a crash or an
  // error, some of these may remain. Errors: FAILED_PRECONDITION if the newest
  // snapshot does not contain all records before `next_sequence`.
  virtual absl::Status Cut(uint64_t next_sequence,
                           const std::set<std::string>& keep_images) = 0;

  // Returns a name that no image has had. Does not block.
  virtual std::string NewImageName() = 0;
  // Writes the pieces, one after another, as an image, durably on success.
  // After an error the image may exist. Errors: INVALID_ARGUMENT (the name is
  // not a single path component), ALREADY_EXISTS.
  virtual absl::Status CreateImage(
      const std::string& name, const std::vector<std::string_view>& pieces) = 0;
  // Errors: INVALID_ARGUMENT (as above), NOT_FOUND.
  virtual absl::StatusOr<std::unique_ptr<ImageReader>> OpenImage(
      const std::string& name) const = 0;
  // Makes the image `name` from one of another log of the same store, durably
  // on success. After an error the image may exist. Errors: NOT_FOUND.
  virtual absl::Status CopyImage(int /*log*/, const std::string& /*from*/,
                                 const std::string& /*name*/) {
    return absl::NotFoundError("a folder has one log");
  }
  // Errors: INVALID_ARGUMENT (as above), NOT_FOUND if it is known that the
  // image did not exist.
  virtual absl::Status RemoveImage(const std::string& name) = 0;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_STATE_H_
