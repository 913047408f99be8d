#include "server/http/file_poller.h"

#include <sys/stat.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace weft::server {
namespace {

constexpr std::chrono::milliseconds kInterval(500);

}  // namespace

FilePoller::FilePoller(std::string path, std::function<void()> changed)
    : path_(std::move(path)),
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
  struct stat found = {};
  if (stat(path_.c_str(), &found) != 0) return "none";
  return absl::StrCat(found.st_dev, ",", found.st_ino, ",", found.st_size, ",",
                      found.st_mtim.tv_sec, ".", found.st_mtim.tv_nsec, ",",
                      found.st_ctim.tv_sec, ".", found.st_ctim.tv_nsec);
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

}  // namespace weft::server
