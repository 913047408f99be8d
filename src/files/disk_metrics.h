// Metrics of the file systems that hold the server's folders.
#ifndef WEFT_SRC_FILES_DISK_METRICS_H_
#define WEFT_SRC_FILES_DISK_METRICS_H_

#include <string>
#include <utility>
#include <vector>

#include "src/metrics/metrics.h"

namespace weft {

struct WatchedFolder {
  std::string label;  // The metrics' label, which is not the path.
  std::string path;
};

// Threads: one.
class DiskMetrics {
 public:
  DiskMetrics(prometheus::Registry* registry,
              std::vector<WatchedFolder> folders)
      : registry_(*registry), folders_(std::move(folders)) {}

  // Reads the file systems. Blocks on the disk. If a read fails, the folder's
  // metrics keep their values; before the first success it has none, because 0
  // would mean a full disk.
  void Refresh();

 private:
  prometheus::Registry& registry_;
  const std::vector<WatchedFolder> folders_;
};

}  // namespace weft

#endif  // WEFT_SRC_FILES_DISK_METRICS_H_
