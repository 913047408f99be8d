// Reads the records of the log of a state folder in their order.
//
// After a crash the last segment may have a torn tail: records of the group
// that was being written, some of them incomplete. No caller was told that they
// are durable, so the log ends before the first bad record. If a later group
// follows a bad record, the record is damaged, because it was on disk before
// the later group was written. A bad record in an earlier segment is damaged,
// too. Next returns DATA_LOSS for a damaged record or segment header, and for a
// missing segment.
//
// Threads: one at a time.
#ifndef WEFT_SRC_LOG_FOLDER_SEGMENT_READER_H_
#define WEFT_SRC_LOG_FOLDER_SEGMENT_READER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/files/file_io.h"
#include "src/log/folder/state_folder.h"
#include "src/log/log_format.h"
#include "src/log/state.h"

namespace weft::log {

class SegmentReader : public LogReader {
 public:
  // Opens the log for reading from record `first_sequence`. `folder` outlives
  // the reader.
  static absl::StatusOr<std::unique_ptr<SegmentReader>> Open(
      const StateFolder& folder, uint64_t first_sequence);

  absl::StatusOr<std::optional<Record>> Next() override;
  uint64_t next_sequence() const override { return next_sequence_; }
  uint64_t torn_bytes() const override { return torn_bytes_; }
  absl::Status Repair() override;
  uint64_t total_bytes() const override { return total_bytes_; }
  uint64_t read_bytes() const override { return read_bytes_; }

 private:
  // An open segment.
  struct Segment {
    UniqueFd fd;
    std::string name;
    uint64_t salt = 0;
    uint64_t first_sequence = 0;
    uint64_t size = 0;
    uint64_t offset = 0;  // Position of the first unread byte.
  };

  SegmentReader(const StateFolder* folder, std::vector<uint64_t> segments,
                uint64_t first_sequence)
      : folder_(folder),
        segments_(std::move(segments)),
        first_sequence_(first_sequence),
        expected_(first_sequence),
        next_sequence_(first_sequence) {}

  absl::Status SyncLastAndSumSizes();
  absl::Status OpenSegment();
  absl::Status ReadSegmentHeader();
  bool IsLast() const { return opened_ == segments_.size(); }
  // Returns the bytes of the record at `offset` of the open segment and sets
  // `*header`. Returns none if there is no good record.
  absl::StatusOr<std::optional<std::string>> ReadRecord(
      uint64_t offset, RecordHeader* header) const;
  absl::Status EndOrDamage();
  // Returns whether a good record of a later group follows the bad record at
  // segment_.offset.
  absl::StatusOr<bool> LaterGroupFollows() const;
  absl::Status Damaged(const std::string& how) const;

  const StateFolder* folder_;
  std::vector<uint64_t> segments_;  // First sequence of each segment,
                                    // ascending.
  size_t opened_ = 0;               // Number of segments opened so far.
  Segment segment_;
  uint64_t first_sequence_;
  uint64_t expected_;  // Sequence that the next record must have.
  uint64_t next_sequence_;
  bool at_end_ = false;
  uint64_t torn_bytes_ = 0;
  uint64_t total_bytes_ = 0;
  uint64_t read_bytes_ = 0;
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_FOLDER_SEGMENT_READER_H_
