// Images as files, and the log as segments.
#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/files/failpoint.h"
#include "src/base/status_macros.h"
#include "src/log/folder/segment_reader.h"
#include "src/log/folder/segment_writer.h"
#include "src/log/folder/state_folder.h"

namespace weft::log {
namespace {

class FileImageReader : public ImageReader {
 public:
  FileImageReader(UniqueFd fd, std::string name)
      : fd_(std::move(fd)), name_(std::move(name)) {}

  absl::StatusOr<size_t> Read(uint64_t offset, std::span<char> bytes) override {
    return ReadAt(fd_.get(), offset, bytes, name_);
  }
  absl::StatusOr<uint64_t> Size() override {
    return FileSize(fd_.get(), name_);
  }

 private:
  const UniqueFd fd_;
  const std::string name_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<LogReader>> StateFolder::OpenLog(
    uint64_t first_sequence) const {
  return SegmentReader::Open(*this, first_sequence);
}

absl::StatusOr<std::unique_ptr<LogSink>> StateFolder::ContinueLog(
    uint64_t next_sequence) {
  return SegmentWriter::Open(this, next_sequence);
}

std::string StateFolder::NewImageName() {
  return absl::StrCat(absl::ToUnixMicros(absl::Now()), "-",
                      num_images_.fetch_add(1));
}

absl::Status StateFolder::CreateImage(
    const std::string& name, const std::vector<std::string_view>& pieces) {
  return PublishFileAt(images_.get(), name, pieces, /*replace=*/false);
}

absl::StatusOr<std::unique_ptr<ImageReader>> StateFolder::OpenImage(
    const std::string& name) const {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  UniqueFd fd;
  if (!Failpoint("journal.open_image")) {
    fd = UniqueFd(::openat(images_.get(), name.c_str(),
                           O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  }
  if (fd.get() < 0) return ErrnoStatus(errno, "opening " + name);
  return std::make_unique<FileImageReader>(std::move(fd), name);
}

absl::Status StateFolder::RemoveImage(const std::string& name) {
  return RemoveFileAt(images_.get(), name);
}

}  // namespace weft::log
