#include "src/base/files/disk_room.h"

#include <cstdint>

#include "gtest/gtest.h"
#include "tests/support/failpoints.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace weft {
namespace {

constexpr uint64_t kMuch = uint64_t{1} << 62;

TEST(DiskRoomTest, BytesAndReserveMustFit) {
  const TempFolder folder;
  EXPECT_THAT(CheckDiskRoom(folder.path(), "x", 1, 1), IsOk());
  EXPECT_THAT(CheckDiskRoom(folder.path(), "the folder", 7, kMuch),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       ", and 7 would be written; --disk-reserve-bytes is "));
  EXPECT_THAT(CheckDiskRoom(folder.path(), "the folder", kMuch, 1),
              IsStatus(absl::StatusCode::kResourceExhausted,
                       "the disk of the folder is full"));
  EXPECT_THAT(CheckDiskRoom(folder.path(), "x", kMuch, 0), IsOk());
}

TEST(DiskRoomTest, AnErrorNamesTheFolder) {
  EXPECT_THAT(ReadDiskRoom("/no/such/folder", "the checkpoints").status(),
              IsStatus(absl::StatusCode::kNotFound,
                       "reading the free room of the checkpoints"));
  const TempFolder folder;
  ScopedFailpoints fail("files.free_bytes=err(EIO)");
  EXPECT_THAT(CheckDiskRoom(folder.path(), "x", 0, 1),
              IsStatus(absl::StatusCode::kInternal, "Input/output error"));
}

}  // namespace
}  // namespace weft
