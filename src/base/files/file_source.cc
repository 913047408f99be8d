#include "src/base/files/file_source.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace weft {

absl::StatusOr<FileSource> FileSource::OpenAt(int dir,
                                              const std::string& name) {
  WEFT_RETURN_IF_ERROR(CheckPathPart(name));
  // With O_NONBLOCK, opening a FIFO of this name does not block.
  UniqueFd file(::openat(dir, name.c_str(),
                         O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0) return ErrnoStatus(errno, "opening " + name);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) {
    return ErrnoStatus(errno, "reading " + name);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InternalError(absl::StrCat(name, " is not a plain file"));
  }
  return FileSource(name, std::move(file), static_cast<uint64_t>(info.st_size));
}

FileSource::FileSource(std::string name, std::string contents)
    : name_(std::move(name)),
      size_(contents.size()),
      contents_(std::make_shared<const std::string>(std::move(contents))) {}

FileSource::FileSource(std::string name, uint64_t size, Reader read)
    : name_(std::move(name)), size_(size), read_(std::move(read)) {}

FileSource::FileSource(std::string name, UniqueFd file, uint64_t size)
    : name_(std::move(name)),
      size_(size),
      file_(std::make_shared<const UniqueFd>(std::move(file))) {}

absl::StatusOr<std::string> FileSource::Read(uint64_t offset,
                                             uint64_t count) const {
  count = std::min(count, size_ - std::min(offset, size_));
  if (count == 0) return std::string();
  if (contents_ != nullptr) return contents_->substr(offset, count);
  if (read_) return read_(offset, count);
  std::string piece(count, '\0');
  WEFT_ASSIGN_OR_RETURN(const size_t read,
                        ReadAt(file_->get(), offset, piece, name_));
  piece.resize(read);
  return piece;
}

}  // namespace weft
