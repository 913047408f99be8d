// Reports changes of a file of the operator, such as that of the tokens.
#ifndef WEFT_SERVER_HTTP_FILE_POLLER_H_
#define WEFT_SERVER_HTTP_FILE_POLLER_H_

#include <functional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "src/base/threads/mutex.h"

namespace weft::server {

// Calls `changed` when the file changes. Checks it every half second. Does not
// use inotify, which misses changes on network file systems and changes that
// Kubernetes makes by swapping symbolic links.
// Threads: `changed` runs on the poller's thread, never after the destructor.
class FilePoller {
 public:
  // The first check always calls `changed`, because the file may have changed
  // after the caller first read it.
  FilePoller(std::string path, std::function<void()> changed);
  ~FilePoller();
  FilePoller(const FilePoller&) = delete;
  FilePoller& operator=(const FilePoller&) = delete;

 private:
  void Loop() ABSL_LOCKS_EXCLUDED(mu_);
  // Returns the file's inode, size and times as text, which differs after the
  // file has changed.
  std::string Signature() const;

  const std::string path_;
  const std::function<void()> changed_;
  Mutex mu_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::string seen_;  // Only the poller's thread uses it.
  std::thread thread_;
};

}  // namespace weft::server

#endif  // WEFT_SERVER_HTTP_FILE_POLLER_H_
