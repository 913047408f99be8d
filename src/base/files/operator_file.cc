#include "src/base/files/operator_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "src/base/files/file_io.h"

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

}  // namespace weft
