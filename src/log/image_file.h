// Writes and reads images. An image is a file below images/ that holds the
// tensors of one adapter as blocks of floats. It gets its name only when it is
// complete, and never changes after that. Its table has each block's size and
// CRC32C. The file omits the bytes of a block of zeros.
//
// Errors: those of file_io.h, such as INVALID_ARGUMENT (a name that is not a
// single path component), and those that the comment of a function names.
// Threads: any, on different names. All functions block on the disk.
#ifndef WEFT_SRC_LOG_IMAGE_FILE_H_
#define WEFT_SRC_LOG_IMAGE_FILE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/log/state_folder.h"

namespace weft::log {

// Writes an image, which is durable on success. After an error the file may
// exist. Errors: ALREADY_EXISTS.
absl::Status WriteImage(const StateFolder& folder, const std::string& name,
                        const std::vector<std::span<const float>>& blocks);

// Reads the blocks. Errors: DATA_LOSS if the file is missing or incomplete, or
// if its sizes or checksums do not match. After an error the content of the
// blocks is undefined.
absl::Status ReadImage(const StateFolder& folder, const std::string& name,
                       const std::vector<std::span<float>>& blocks);

// Reads and checks a whole image of `num_blocks` blocks of any size. Returns
// the size of the file in bytes. Errors: as for ReadImage.
absl::StatusOr<uint64_t> CheckImage(const StateFolder& folder,
                                    const std::string& name, size_t num_blocks);

// Checks the table and the size of an image of `num_blocks` blocks. Does not
// read the blocks. Errors: as for ReadImage.
absl::Status CheckImageTable(const StateFolder& folder, const std::string& name,
                             size_t num_blocks);

// Removes an image. Errors: NOT_FOUND.
absl::Status RemoveImage(const StateFolder& folder, const std::string& name);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_IMAGE_FILE_H_
