#include "src/base/files/disk_room.h"

#include <sys/statvfs.h>

#include <cerrno>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "src/base/files/failpoint.h"
#include "src/base/files/file_io.h"
#include "src/base/status_macros.h"

namespace weft {

absl::StatusOr<DiskRoom> ReadDiskRoom(const std::string& path,
                                      const std::string& what) {
  struct statvfs info {};
  if (Failpoint("files.free_bytes") || ::statvfs(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat("reading the free room of ", what));
  }
  const uint64_t unit = info.f_frsize;
  return DiskRoom{
      .free = unit * info.f_bavail,
      .size = unit * (info.f_bavail + info.f_blocks - info.f_bfree)};
}

absl::Status CheckDiskRoom(const std::string& path, const std::string& what,
                           uint64_t bytes, uint64_t reserve) {
  if (reserve == 0) return absl::OkStatus();
  WEFT_ASSIGN_OR_RETURN(const DiskRoom room, ReadDiskRoom(path, what));
  const uint64_t free = room.free;
  if (free >= bytes && free - bytes >= reserve) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the disk of ", what, " is full",
      bytes > 0 ? absl::StrCat(", and ", bytes, " would be written") : "",
      "; --disk-reserve-bytes is ", reserve));
}

void DiskMetrics::Refresh() {
  for (const WatchedFolder& folder : folders_) {
    const absl::StatusOr<DiskRoom> room =
        ReadDiskRoom(folder.path, folder.label);
    if (!room.ok()) continue;
    const prometheus::Labels labels = {{"folder", folder.label}};
    AddGauge(&registry_, "weft_disk_free_bytes",
             "Bytes that weftd may still write to the folder's file system, "
             "read each second.",
             labels)
        .Set(static_cast<double>(room->free));
    AddGauge(&registry_, "weft_disk_size_bytes",
             "Bytes of the folder's file system that are free to weftd or in "
             "use.",
             labels)
        .Set(static_cast<double>(room->size));
  }
}

}  // namespace weft
