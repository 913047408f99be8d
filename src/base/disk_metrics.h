// Metrics of the file systems that hold the server's folders.
#ifndef WEFT_SRC_BASE_DISK_METRICS_H_
#define WEFT_SRC_BASE_DISK_METRICS_H_

#include <string>
#include <utility>
#include <vector>

#include "src/base/metrics.h"

namespace weft {

struct WatchedFolder {
  std::string label;  // Names the folder in the metrics, such as "spill".
  std::string path;
};

// Sets the gauges of free and total bytes, one pair for each folder. Not
// thread-safe.
class DiskMetrics {
 public:
  DiskMetrics(prometheus::Registry* registry,
              std::vector<WatchedFolder> folders)
      : registry_(*registry), folders_(std::move(folders)) {}

  // Reads the file systems and sets the gauges. Blocks on the disk. If a read
  // fails, the gauges of this folder keep their values. A folder without a
  // successful read has no gauges, because a gauge of 0 would mean a full disk.
  void Refresh();

 private:
  prometheus::Registry& registry_;
  const std::vector<WatchedFolder> folders_;
};

}  // namespace weft

#endif  // WEFT_SRC_BASE_DISK_METRICS_H_
