// Writes a segment, which is one file of the log.
//
// Threads: one at a time. All functions but salt() block on the disk.
#ifndef WEFT_SRC_LOG_LOG_SEGMENT_H_
#define WEFT_SRC_LOG_LOG_SEGMENT_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/file_io.h"
#include "src/log/state_folder.h"

namespace weft::journal {

class LogSegment {
 public:
  // Creates the file and writes its header durably. Replaces a file of the same
  // name. Such a file has no records, because the log ends before
  // `first_sequence`. After RESOURCE_EXHAUSTED the caller may try again.
  [[nodiscard]] static absl::StatusOr<LogSegment> Create(
      const StateFolder& folder, uint64_t first_sequence);

  // Appends bytes. After RESOURCE_EXHAUSTED nothing is appended and the caller
  // may try again. Any other error is final.
  [[nodiscard]] absl::Status Write(const std::string& bytes);
  // Syncs the appended bytes to disk. Every error is final.
  [[nodiscard]] absl::Status Sync();

  [[nodiscard]] uint64_t salt() const { return salt_; }

 private:
  LogSegment(UniqueFd fd, std::string name, uint64_t salt, uint64_t size)
      : fd_(std::move(fd)), name_(std::move(name)), salt_(salt), size_(size) {}

  UniqueFd fd_;
  std::string name_;
  uint64_t salt_;
  uint64_t size_;  // Bytes of the header and of all successful writes.
};

}  // namespace weft::journal

#endif  // WEFT_SRC_LOG_LOG_SEGMENT_H_
