// Tensor bytes from a checkpoint straight into their place.
#ifndef WEFT_SRC_WEIGHTS_TENSOR_READER_H_
#define WEFT_SRC_WEIGHTS_TENSOR_READER_H_

#include <ATen/core/Tensor.h>

#include <string_view>

#include "absl/status/status.h"
#include "src/weights/checkpoint.h"

namespace weft::weights {

// Copies tensor `name` into `destination`, converting to its dtype and moving
// to its device; no intermediate full copy on the CPU. Shapes:  destination has
// the tensor's shape, rows contiguous; it may be a
//          narrow view of a fused matrix.
// Errors:  NOT_FOUND; INVALID_ARGUMENT naming tensor, its shape and the
//          expected one, or a dtype other than F32, F16, BF16.
// Threads: any; distinct destinations may be filled in parallel.
[[nodiscard]] absl::Status ReadTensor(const Checkpoint& checkpoint,
                                      std::string_view name,
                                      at::Tensor destination);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_READER_H_
