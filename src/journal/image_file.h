// Images: blocks of floats of one adapter in one file below images/. A file is
// written once and whole; its table has each block's size and CRC32C, checked
// when it is read. A block whose bytes are all zero takes no room.
//
// Errors: those of state_folder.h, INVALID_ARGUMENT (a name with '/', "." and
// the like), and what the functions say.
// Threads: any, on different names. All functions block on the disk.
#ifndef WEFT_SRC_JOURNAL_IMAGE_FILE_H_
#define WEFT_SRC_JOURNAL_IMAGE_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/journal/state_folder.h"

namespace weft::journal {

// Writes an image, which is durable on success. After an error there is no such
// image. Errors: ALREADY_EXISTS.
[[nodiscard]] absl::Status WriteImage(
    const StateFolder& folder, const std::string& name,
    const std::vector<std::span<const float>>& blocks);

// Fills the blocks. Errors: NOT_FOUND; DATA_LOSS if the file is incomplete or
// its sizes or sums do not match. After an error the blocks' content is
// undefined.
[[nodiscard]] absl::Status ReadImage(
    const StateFolder& folder, const std::string& name,
    const std::vector<std::span<float>>& blocks);

// Reads all of an image of so many blocks, of any size, and returns its
// bytes. Errors: as ReadImage.
[[nodiscard]] absl::StatusOr<uint64_t> CheckImage(const StateFolder& folder,
                                                  const std::string& name,
                                                  size_t num_blocks);

// NOT_FOUND.
[[nodiscard]] absl::Status RemoveImage(const StateFolder& folder,
                                       const std::string& name);

}  // namespace weft::journal

#endif  // WEFT_SRC_JOURNAL_IMAGE_FILE_H_
