// Tensor bytes from a checkpoint straight into their place.
#ifndef WEFT_SRC_WEIGHTS_TENSOR_READER_H_
#define WEFT_SRC_WEIGHTS_TENSOR_READER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "src/weights/checkpoint.h"

namespace weft::weights {

// Reads tensor `name` into `destination`, converting to its dtype and moving to
// its device; no intermediate full copy on the CPU, and none at all when dtype
// and device are the file's.
// Shapes:  destination has the tensor's shape, rows contiguous; it may be a
//          narrow view of a fused matrix.
// Errors:  NOT_FOUND; INVALID_ARGUMENT naming tensor, its shape and the
//          expected one, a dtype other than F32, F16, BF16, or a tensor that
//          is not row-major; DATA_LOSS when the file was cut short.
// Threads: any; distinct destinations may be filled in parallel.
[[nodiscard]] absl::Status ReadTensor(const Checkpoint& checkpoint,
                                      std::string_view name,
                                      at::Tensor destination);

// The same for a piece of a tensor: rows [first_row, first_row + N) for a
// destination of N rows. No other row is read. INVALID_ARGUMENT too when the
// tensor has not as many.
[[nodiscard]] absl::Status ReadTensorRows(const Checkpoint& checkpoint,
                                          std::string_view name,
                                          int64_t first_row,
                                          at::Tensor destination);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_READER_H_
