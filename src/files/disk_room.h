// The free room of file systems. Threads: any. Functions block on the disk.
#ifndef WEFT_SRC_FILES_DISK_ROOM_H_
#define WEFT_SRC_FILES_DISK_ROOM_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace weft {

// Bytes of a file system, for a process that does not run as root.
struct DiskRoom {
  uint64_t free = 0;
  uint64_t size = 0;  // Free bytes and those in use.
};

// Reads the room of the file system that holds the folder `path`. Errors: those
// of ErrnoStatus, which name `what`.
[[nodiscard]] absl::StatusOr<DiskRoom> ReadDiskRoom(const std::string& path,
                                                    const std::string& what);

// Returns RESOURCE_EXHAUSTED if fewer than `reserve` bytes are free after
// `bytes` were written to the folder `path`. Without a reserve everything has
// room. Errors also: those of ReadDiskRoom.
[[nodiscard]] absl::Status CheckDiskRoom(const std::string& path,
                                         const std::string& what,
                                         uint64_t bytes, uint64_t reserve);

}  // namespace weft

#endif  // WEFT_SRC_FILES_DISK_ROOM_H_
