// Reads the records of a log in their order.
//
// A process or a machine that dies leaves the last segment with a torn tail:
// records of the group that was being written, some of them not whole. Nobody
// was told that they are durable, so the log ends before the first one that is
// bad. A bad record is damage (DATA_LOSS, with segment and offset) when a later
// group follows it, for that was written when the bad one was on disk; so is a
// bad record in any segment but the last, and a missing segment.
//
// Threads: one at a time.
#ifndef WEFT_SRC_JOURNAL_LOG_READER_H_
#define WEFT_SRC_JOURNAL_LOG_READER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/files/file_io.h"
#include "src/journal/log_format.h"
#include "src/journal/state_folder.h"

namespace weft::journal {

class LogReader {
 public:
  struct Record {
    uint64_t sequence = 0;
    std::string bytes;
  };

  // Reads from the record `first_sequence` on; `folder` outlives the reader.
  // DATA_LOSS when the segment that holds it is missing and later ones are not.
  [[nodiscard]] static absl::StatusOr<LogReader> Open(const StateFolder& folder,
                                                      uint64_t first_sequence);

  // None at the end.
  [[nodiscard]] absl::StatusOr<std::optional<Record>> Next();

  // The sequence of the record that Next gives next; at the end: the one that
  // the log goes on with.
  [[nodiscard]] uint64_t next_sequence() const { return next_sequence_; }

  // What the last segment holds beyond the log's end; known at the end.
  [[nodiscard]] uint64_t torn_bytes() const { return torn_bytes_; }
  // Cuts the torn tail, durably. REQUIRES: Next has given none.
  [[nodiscard]] absl::Status Repair();

  // For a progress bar: all bytes of the segments, and those that are read.
  [[nodiscard]] uint64_t total_bytes() const { return total_bytes_; }
  [[nodiscard]] uint64_t read_bytes() const { return read_bytes_; }

 private:
  // A segment that is open.
  struct Segment {
    UniqueFd fd;
    std::string name;
    uint64_t salt = 0;
    uint64_t first_sequence = 0;
    uint64_t size = 0;
    uint64_t offset = 0;  // The first byte that is not read.
  };

  LogReader(const StateFolder* folder, std::vector<uint64_t> segments,
            uint64_t first_sequence)
      : folder_(folder),
        segments_(std::move(segments)),
        first_sequence_(first_sequence),
        next_sequence_(first_sequence) {}

  [[nodiscard]] absl::Status SyncLastAndSumSizes();
  [[nodiscard]] absl::Status OpenSegment();
  [[nodiscard]] absl::Status ReadSegmentHeader();
  [[nodiscard]] bool IsLast() const { return opened_ == segments_.size(); }
  // The good record at `offset` of the open segment, with its header; none when
  // what is there is not one.
  [[nodiscard]] absl::StatusOr<std::optional<std::string>> ReadRecord(
      uint64_t offset, RecordHeader* header) const;
  [[nodiscard]] absl::Status EndOrDamage();
  [[nodiscard]] absl::StatusOr<bool> LaterGroupFollows() const;
  [[nodiscard]] absl::Status Damaged(const std::string& how) const;

  const StateFolder* folder_;
  std::vector<uint64_t> segments_;  // First sequences of those to read.
  size_t opened_ = 0;               // How many of them were opened.
  Segment segment_;
  uint64_t first_sequence_;
  uint64_t expected_ = 0;  // The sequence at the offset.
  uint64_t next_sequence_;
  bool at_end_ = false;
  uint64_t torn_bytes_ = 0;
  uint64_t total_bytes_ = 0;
  uint64_t read_bytes_ = 0;
};

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_LOG_READER_H_
