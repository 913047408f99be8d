// What a build with CUDA adds to DrawRows and EditRows
// (src/ops/cuda_dispatch.h).
//
// Legend: R rows, V vocabulary.
#ifndef WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
#define WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "src/sampling/draw_rows.h"
#include "src/sampling/logit_edits.h"

namespace weft::sampling::cuda {

// Do what the functions of sampling do, for logits on a CUDA device.
std::vector<std::optional<DrawResult>> DrawRows(
    const at::Tensor& logits_RV, const std::vector<DrawRule>& rules);
void EditRows(const at::Tensor& logits_RV, const std::vector<RowEdits>& rows);

}  // namespace weft::sampling::cuda

#endif  // WEFT_SRC_SAMPLING_DRAW_ROWS_CUDA_H_
