// Says which tensors the kernels of kernels/cpu take, and how rows are split
// over threads.
#ifndef WEFT_SRC_OPS_CPU_DISPATCH_H_
#define WEFT_SRC_OPS_CPU_DISPATCH_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace weft::ops {

// f32 on the CPU. Everything else takes the ATen reference of the same file.
[[nodiscard]] inline bool HasCpuKernel(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat;
}

// The dtype in which a reference computes: f64 for f64, else f32.
[[nodiscard]] inline at::ScalarType ComputeType(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Rows per task of at::parallel_for, so that a task is worth a thread's
// wake-up.
[[nodiscard]] inline int64_t RowGrain(int64_t elements_per_row) {
  constexpr int64_t kElementsPerTask = 16384;
  return std::max<int64_t>(
      1, kElementsPerTask / std::max<int64_t>(1, elements_per_row));
}

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_CPU_DISPATCH_H_
