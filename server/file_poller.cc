#include "server/file_poller.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/files/file_io.h"

namespace weft {
namespace {

constexpr std::chrono::milliseconds kInterval(500);
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

FilePoller::FilePoller(std::vector<std::string> paths,
                       std::function<void()> changed)
    : paths_(std::move(paths)),
      changed_(std::move(changed)),
      thread_([this] { Loop(); }) {}

FilePoller::~FilePoller() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
  }
  stop_.NotifyAll();
  thread_.join();
}

std::string FilePoller::Signature() const {
  std::string signature;
  for (const std::string& path : paths_) {
    struct stat found = {};
    if (stat(path.c_str(), &found) != 0) {
      absl::StrAppend(&signature, "none;");
      continue;
    }
    absl::StrAppend(&signature, found.st_dev, ",", found.st_ino, ",",
                    found.st_size, ",", found.st_mtim.tv_sec, ".",
                    found.st_mtim.tv_nsec, ",", found.st_ctim.tv_sec, ".",
                    found.st_ctim.tv_nsec, ";");
  }
  return signature;
}

void FilePoller::Loop() {
  for (;;) {
    {
      MutexLock lock(&mu_);
      if (!stopping_) stop_.WaitFor(&mu_, kInterval);
      if (stopping_) return;
    }
    // The signature is taken before `changed` reads the files. So if a file
    // changes during the reading, the next check reports it.
    std::string now = Signature();
    if (now == seen_) continue;
    seen_ = std::move(now);
    changed_();
  }
}

}  // namespace weft
