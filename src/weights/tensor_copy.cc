#include "src/weights/tensor_copy.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/weights/safetensors.h"

namespace weft::weights {
namespace {

constexpr uint64_t kCopyBytes = uint64_t{4} << 20;

// A new file, which has a temporary name until Commit renames it. Without
// Commit the destructor removes the file.
class NewFile {
 public:
  explicit NewFile(std::string path)
      : path_(std::move(path)),
        draft_(absl::StrCat(path_, ".partial.", getpid())) {}
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;
  ~NewFile() {
    if (fd_ < 0) return;
    close(fd_);
    unlink(draft_.c_str());
  }

  absl::Status Open() {
    fd_ = open(draft_.c_str(),
               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    return fd_ < 0 ? Error("cannot be created") : absl::OkStatus();
  }

  absl::Status Write(absl::Span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t written = write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return Error("cannot be written");
      bytes.remove_prefix(static_cast<size_t>(written));
    }
    return absl::OkStatus();
  }

  absl::Status Commit() {
    if (fsync(fd_) != 0) return Error("cannot be synced");
    close(std::exchange(fd_, -1));
    if (rename(draft_.c_str(), path_.c_str()) == 0) return absl::OkStatus();
    const absl::Status error = Error("cannot be renamed");
    unlink(draft_.c_str());
    return error;
  }

 private:
  absl::Status Error(absl::string_view what) const {
    return absl::ErrnoToStatus(errno, absl::StrCat(draft_, " ", what));
  }

  const std::string path_;
  const std::string draft_;
  int fd_ = -1;
};

absl::Span<const std::byte> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

absl::Status CopyTensor(const CopiedTensor& tensor, NewFile& file,
                        const std::function<void(int64_t)>& on_copied) {
  const DiskTensor& source = tensor.source;
  const bool compare =
      tensor.twin.has_value() && !tensor.twin->IsSameAs(source);
  const absl::Status differs = absl::InvalidArgumentError(
      absl::StrCat(QuotedTensor(source.name()), " differs from ",
                   compare ? QuotedTensor(tensor.twin->name()) : ""));
  if (compare && (tensor.twin->dtype() != source.dtype() ||
                  tensor.twin->shape() != source.shape())) {
    return differs;
  }
  std::vector<std::byte> block;
  std::vector<std::byte> twin;
  for (uint64_t done = 0; done < source.size_bytes(); done += block.size()) {
    block.resize(std::min(kCopyBytes, source.size_bytes() - done));
    WEFT_RETURN_IF_ERROR(source.ReadBytes(done, absl::MakeSpan(block)));
    if (compare) {
      twin.resize(block.size());
      WEFT_RETURN_IF_ERROR(tensor.twin->ReadBytes(done, absl::MakeSpan(twin)));
      if (block != twin) return differs;
    }
    WEFT_RETURN_IF_ERROR(file.Write(block));
    on_copied(static_cast<int64_t>(block.size()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CopyTensors(const std::vector<CopiedTensor>& tensors,
                         const std::string& path,
                         const std::function<void(int64_t)>& on_copied) {
  std::vector<TensorHeader> headers;
  for (const CopiedTensor& tensor : tensors) {
    const DiskTensor& source = tensor.source;
    headers.push_back(
        {tensor.name, source.dtype(), source.shape(), source.size_bytes()});
  }
  NewFile file(path);
  WEFT_RETURN_IF_ERROR(file.Open());
  WEFT_RETURN_IF_ERROR(file.Write(AsBytes(SafetensorsStart(headers))));
  for (const CopiedTensor& tensor : tensors) {
    WEFT_RETURN_IF_ERROR(CopyTensor(tensor, file, on_copied));
  }
  return file.Commit();
}

absl::Status ReplaceFile(const std::string& path, absl::string_view contents) {
  NewFile file(path);
  WEFT_RETURN_IF_ERROR(file.Open());
  WEFT_RETURN_IF_ERROR(file.Write(AsBytes(contents)));
  return file.Commit();
}

}  // namespace weft::weights
