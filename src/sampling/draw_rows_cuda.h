// DrawRows with the kernel of a device. Not there in a build without CUDA
// (src/ops/cuda_dispatch.h). Private to sampling/.
#ifndef WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
#define WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "src/sampling/draw_rows.h"

namespace weft::sampling::cuda {

// As sampling::DrawRows, for logits on a CUDA device.
[[nodiscard]] std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);

}  // namespace weft::sampling::cuda

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
