// Writes and reads images. An image holds the tensors of one adapter as blocks
// of floats. It gets its name only when it is complete, and never changes after
// that. Its table has each block's size and CRC32C. The image omits the bytes
// of a block of zeros.
//
// Errors: those of state.h, and those that the comment of a function names.
// Threads: any, on different names. All functions block as those of the state.
#ifndef WEFT_SRC_LOG_IMAGE_H_
#define WEFT_SRC_LOG_IMAGE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/log/state.h"

namespace weft::log {

// Writes an image, which is durable on success. After an error the image
// may exist. Errors: ALREADY_EXISTS.
absl::Status WriteImage(State& state, const std::string& name,
                        const std::vector<std::span<const float>>& blocks);

// Reads the blocks. Errors: DATA_LOSS if the image is missing or incomplete, or
// if its sizes or checksums do not match. After an error the content of the
// blocks is undefined.
absl::Status ReadImage(const State& state, const std::string& name,
                       const std::vector<std::span<float>>& blocks);

// Reads and checks a whole image of `num_blocks` blocks of any size. Returns
// its size in bytes. Errors: as for ReadImage.
absl::StatusOr<uint64_t> CheckImage(const State& state, const std::string& name,
                                    size_t num_blocks);

// Checks the table and the size of an image of `num_blocks` blocks. Does not
// read the blocks. Errors: as for ReadImage.
absl::Status CheckImageTable(const State& state, const std::string& name,
                             size_t num_blocks);

struct ImageShape {
  std::string name;
  size_t num_blocks = 0;
};
// Checks the tables of images, some at once, because a store takes its time for
// each.
absl::Status CheckImageTables(const State& state,
                              const std::vector<ImageShape>& images);

}  // namespace weft::log

#endif  // WEFT_SRC_LOG_IMAGE_H_
