#include "src/log/folder/segment_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/status_macros.h"
#include "src/log/folder/segment_reader.h"
#include "src/log/log_format.h"

namespace weft::log {
namespace {

// Checks that the log ends just before record `sequence`, so that a segment may
// begin with this record.
absl::Status CheckLogEndsAt(const StateFolder& folder, uint64_t sequence) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> segments,
                        folder.Segments());
  if (segments.empty()) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const std::unique_ptr<SegmentReader> reader,
                        SegmentReader::Open(folder, segments.back()));
  for (bool more = true; more;) {
    WEFT_ASSIGN_OR_RETURN(const auto record, reader->Next());
    more = record.has_value();
  }
  if (reader->torn_bytes() > 0) {
    return absl::FailedPreconditionError("the log has a torn tail");
  }
  WEFT_ASSIGN_OR_RETURN(const std::vector<uint64_t> snapshots,
                        folder.Snapshots());
  const uint64_t covered = snapshots.empty() ? 0 : snapshots.back();
  const uint64_t end = std::max(reader->next_sequence(), covered);
  if (sequence == end) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the log goes on with record ", end, ", not with ", sequence));
}

uint64_t RandomSalt() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Returns INTERNAL, even if the disk is full, because a caller would try again
// after RESOURCE_EXHAUSTED. After a failed sync the kernel may have dropped
// dirty pages, so only the next start can tell what is on disk.
absl::Status Final(const std::string& what, const std::string& name) {
  return absl::InternalError(ErrnoStatus(errno, what + name).message());
}

}  // namespace

absl::StatusOr<std::unique_ptr<SegmentWriter>> SegmentWriter::Open(
    const StateFolder* folder, uint64_t next_sequence) {
  WEFT_RETURN_IF_ERROR(CheckLogEndsAt(*folder, next_sequence));
  std::unique_ptr<SegmentWriter> writer(new SegmentWriter(folder));
  WEFT_RETURN_IF_ERROR(writer->BeginSegment(next_sequence));
  return writer;
}

absl::Status SegmentWriter::BeginSegment(uint64_t first_sequence) {
  const std::string name = StateFolder::SegmentName(first_sequence);
  const uint64_t salt = RandomSalt();
  const std::string header =
      EncodeSegmentHeader({.salt = salt, .first_sequence = first_sequence});
  WEFT_RETURN_IF_ERROR(
      PublishFileAt(folder_.log_directory(), name, {header}, true));
  UniqueFd fd;
  if (!Failpoint("journal.open_segment")) {
    fd = UniqueFd(::openat(folder_.log_directory(), name.c_str(),
                           O_WRONLY | O_NOFOLLOW | O_CLOEXEC));
  }
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + name);
  fd_ = std::move(fd);
  name_ = name;
  salt_ = salt;
  size_ = header.size();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> SegmentWriter::WriteGroup(
    uint64_t first_sequence, const std::vector<std::string>& records) {
  const std::string bytes = EncodeGroup(salt_, first_sequence, records);
  WEFT_RETURN_IF_ERROR(Append(bytes));
  if (Failpoint("journal.sync") || ::fdatasync(fd_.get()) != 0) {
    return Final("syncing ", name_);
  }
  return bytes.size();
}

absl::Status SegmentWriter::Append(const std::string& bytes) {
  const absl::Status status = WriteAt(fd_.get(), size_, bytes, name_);
  if (status.ok()) {
    size_ += bytes.size();
    return status;
  }
  if (absl::IsResourceExhausted(status) &&
      (Failpoint("journal.cut_back") ||
       ::ftruncate(fd_.get(), static_cast<off_t>(size_)) != 0)) {
    return Final("cutting back ", name_);
  }
  return status;
}

}  // namespace weft::log
