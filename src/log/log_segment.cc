#include "src/log/log_segment.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <random>

#include "absl/strings/str_cat.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/log/log_format.h"

namespace weft::journal {
namespace {

uint64_t RandomSalt() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

// Returns INTERNAL, even if the disk is full, because a caller would try again
// after RESOURCE_EXHAUSTED.
absl::Status Final(const std::string& what, const std::string& name) {
  return absl::InternalError(ErrnoStatus(errno, what + name).message());
}

}  // namespace

absl::StatusOr<LogSegment> LogSegment::Create(const StateFolder& folder,
                                              uint64_t first_sequence) {
  const std::string name = StateFolder::SegmentName(first_sequence);
  const uint64_t salt = RandomSalt();
  const std::string header =
      EncodeSegmentHeader({.salt = salt, .first_sequence = first_sequence});
  WEFT_RETURN_IF_ERROR(
      PublishFileAt(folder.log_directory(), name, {header}, true));
  UniqueFd fd;
  if (!Failpoint("journal.open_segment")) {
    fd = UniqueFd(::openat(folder.log_directory(), name.c_str(),
                           O_WRONLY | O_NOFOLLOW | O_CLOEXEC));
  }
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + name);
  return LogSegment(std::move(fd), name, salt, header.size());
}

absl::Status LogSegment::Write(const std::string& bytes) {
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

absl::Status LogSegment::Sync() {
  if (Failpoint("journal.sync") || ::fdatasync(fd_.get()) != 0) {
    return Final("syncing ", name_);
  }
  return absl::OkStatus();
}

}  // namespace weft::journal
