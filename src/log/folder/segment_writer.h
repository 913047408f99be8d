// Appends groups of records to the segments of a state folder, each with one
// write and one sync.
#ifndef WEFT_SRC_LOG_FOLDER_SEGMENT_WRITER_H_
#define WEFT_SRC_LOG_FOLDER_SEGMENT_WRITER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/files/file_io.h"
#include "src/log/folder/state_folder.h"
#include "src/log/state.h"

namespace weft::log {

// Threads: one at a time. All functions block on the disk.
class SegmentWriter : public LogSink {
 public:
  // Begins a segment at `next_sequence`. `folder` outlives the writer. Errors:
  // those of State::ContinueLog.
  static absl::StatusOr<std::unique_ptr<SegmentWriter>> Open(
      const StateFolder* folder, uint64_t next_sequence);

  // Creates the segment's file and writes its header. Replaces a file of the
  // same name. Such a file has no records, because the log ends before
  // `first_sequence`.
  absl::Status BeginSegment(uint64_t first_sequence) override;

  // After RESOURCE_EXHAUSTED nothing is appended.
  absl::StatusOr<uint64_t> WriteGroup(
      uint64_t first_sequence,
      const std::vector<std::string>& records) override;

 private:
  explicit SegmentWriter(const StateFolder* folder) : folder_(*folder) {}

  absl::Status Append(const std::string& bytes);

  const StateFolder& folder_;
  UniqueFd fd_;
  std::string name_;
  uint64_t salt_ = 0;
  uint64_t size_ = 0;  // Bytes of the header and of all successful writes.
};

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_FOLDER_SEGMENT_WRITER_H_
