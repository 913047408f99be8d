// Tells when files of the operator have changed: certificates, tokens.
#ifndef WEFT_SERVER_FILE_POLLER_H_
#define WEFT_SERVER_FILE_POLLER_H_

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "src/base/mutex.h"

namespace weft {

// The whole file; links are followed. NOT_FOUND or INTERNAL without the path,
// RESOURCE_EXHAUSTED above 16 MiB: no file of these kinds is that large.
[[nodiscard]] absl::StatusOr<std::string> ReadOperatorFile(
    const std::string& path);

// Looks every half second. Polls rather than inotify: Kubernetes swaps links to
// folders, and network file systems tell nobody.
// Threads: `changed` runs on the poller's own, never after the destructor.
class FilePoller {
 public:
  // The first round always reports: nothing is missed that changed while the
  // caller read the files for the first time.
  FilePoller(std::vector<std::string> paths, std::function<void()> changed);
  ~FilePoller();
  FilePoller(const FilePoller&) = delete;
  FilePoller& operator=(const FilePoller&) = delete;

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mu_);
  // What tells one state of the files from another.
  [[nodiscard]] std::string Signature() const;

  const std::vector<std::string> paths_;
  const std::function<void()> changed_;
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::string seen_;  // The poller's thread.
  std::thread thread_;
};

}  // namespace weft

#endif  // WEFT_SERVER_FILE_POLLER_H_
