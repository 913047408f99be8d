#include "src/base/disk_metrics.h"

#include "absl/status/statusor.h"
#include "src/base/disk_room.h"

namespace weft {

void DiskMetrics::Refresh() {
  for (const WatchedFolder& folder : folders_) {
    const absl::StatusOr<DiskRoom> room =
        ReadDiskRoom(folder.path, folder.label);
    if (!room.ok()) continue;
    const prometheus::Labels labels = {{"folder", folder.label}};
    AddGauge(&registry_, "weft_disk_free_bytes",
             "Bytes that the server may still write to the folder's file "
             "system.",
             labels)
        .Set(static_cast<double>(room->free));
    AddGauge(&registry_, "weft_disk_size_bytes",
             "Bytes of the folder's file system that are free or in use.",
             labels)
        .Set(static_cast<double>(room->size));
  }
}

}  // namespace weft
