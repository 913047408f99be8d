// Reads how many bytes of a file system are free. Threads: any. The functions
// block on the disk.
#ifndef WEFT_SRC_BASE_FILES_DISK_ROOM_H_
#define WEFT_SRC_BASE_FILES_DISK_ROOM_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/base/observe/metrics.h"

namespace weft {

// The bytes of a file system that a process can use without being root.
struct DiskRoom {
  uint64_t free = 0;
  uint64_t size = 0;  // Free bytes plus bytes in use.
};

// Reads the free and total bytes of the file system that holds the folder
// `path`. Errors: those of ErrnoStatus. The message names `what`.
absl::StatusOr<DiskRoom> ReadDiskRoom(const std::string& path,
                                      const std::string& what);

// Returns RESOURCE_EXHAUSTED if a write of `bytes` bytes to the folder `path`
// would leave fewer than `reserve` bytes free. If `reserve` is 0, returns OK
// and reads nothing. Other errors: those of ReadDiskRoom.
absl::Status CheckDiskRoom(const std::string& path, const std::string& what,
                           uint64_t bytes, uint64_t reserve);

// Metrics of the file systems that hold the server's folders.
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

#endif  // WEFT_SRC_BASE_FILES_DISK_ROOM_H_
