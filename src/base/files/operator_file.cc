#include "src/base/files/operator_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "src/base/files/file_io.h"
#include "src/base/observe/log.h"

namespace weft {
namespace {

constexpr size_t kMaxFileBytes = 16 << 20;

}  // namespace

absl::StatusOr<std::string> ReadOperatorFile(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (fd.get() < 0) return ErrnoStatus(errno, "opening the file");
  std::string contents;
  char buffer[16384];
  for (;;) {
    const ssize_t count = read(fd.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return ErrnoStatus(errno, "reading the file");
    if (count == 0) return contents;
    contents.append(buffer, static_cast<size_t>(count));
    if (contents.size() > kMaxFileBytes) {
      return absl::ResourceExhaustedError("the file is larger than 16 MiB");
    }
  }
}

void WarnIfOthersMayWrite(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return;
  const bool is_ours = info.st_uid == ::geteuid() || info.st_uid == 0;
  if (is_ours && (info.st_mode & S_IWOTH) == 0) return;
  Log(LogLevel::kWarning, "other users may write this: use chown or chmod o-w",
      {{"path", path}, {"owner", info.st_uid}});
}

}  // namespace weft
