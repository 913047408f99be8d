// Reports changes of the operator's files, such as certificates and tokens.
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

// Reads the whole file and follows links. Errors: NOT_FOUND or INTERNAL without
// the path; RESOURCE_EXHAUSTED above 16 MiB, which is more than such a file
// needs.
[[nodiscard]] absl::StatusOr<std::string> ReadOperatorFile(
    const std::string& path);

// Checks the files every half second. It does not use inotify, because
// Kubernetes swaps links to folders and network file systems report no changes.
// Threads: `changed` runs on the poller's thread, never after the destructor.
class FilePoller {
 public:
  // The first round always reports a change, so that none is missed while the
  // caller reads the files for the first time.
  FilePoller(std::vector<std::string> paths, std::function<void()> changed);
  ~FilePoller();
  FilePoller(const FilePoller&) = delete;
  FilePoller& operator=(const FilePoller&) = delete;

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mu_);
  // Returns a value that changes when the files change.
  [[nodiscard]] std::string Signature() const;

  const std::vector<std::string> paths_;
  const std::function<void()> changed_;
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::string seen_;  // Only the poller's thread uses it.
  std::thread thread_;
};

}  // namespace weft

#endif  // WEFT_SERVER_FILE_POLLER_H_
