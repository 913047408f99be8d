// Writes rows of a checkpoint's tensor to the matrix of a rank. Private to
// src/model.
#ifndef WEFT_SRC_MODEL_STORE_ROWS_H_
#define WEFT_SRC_MODEL_STORE_ROWS_H_

#include <ATen/core/Tensor.h>

#include "absl/status/status.h"
#include "src/model_config/weight_list.h"
#include "src/weights/tensor_reader.h"

namespace weft::model {

// Writes rows to `destination`, in the dtype of `destination` or quantised to 8
// bits. Shapes: rows [n, columns] of any floating-point dtype on the CPU.
// Errors: INVALID_ARGUMENT with the name of the entry's tensor, if a number
// that is to be quantised is not finite. Threads: any.
[[nodiscard]] absl::Status StoreRows(const WeightEntry& entry,
                                     const at::Tensor& rows,
                                     const at::Tensor& destination);

// Returns the format in which a ReadPlan writes the entry to `destination`.
// `entry` outlives the plan.
[[nodiscard]] weights::RowFormat FormatOf(const WeightEntry& entry,
                                          const at::Tensor& destination);

}  // namespace weft::model

#endif  // WEFT_SRC_MODEL_STORE_ROWS_H_
