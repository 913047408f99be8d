// Decides which tensors the kernels of kernels/cpu take, and how rows are split
// over threads.
#ifndef WEFT_SRC_OPS_CPU_DISPATCH_H_
#define WEFT_SRC_OPS_CPU_DISPATCH_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

namespace weft::ops {

// Returns whether the tensor is f32 on the CPU. A tensor that has neither a CPU
// nor a CUDA kernel goes to the ATen reference in the op's source.
inline bool HasCpuKernel(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat;
}

// Returns the dtype in which an ATen reference computes: f64 for f64, otherwise
// f32.
inline at::ScalarType ComputeType(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Returns a / b, rounded up.
inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns the fewest rows that are worth waking a thread: the grain for
// at::parallel_for and ParallelFor.
inline int64_t RowGrain(int64_t elements_per_row) {
  constexpr int64_t kElementsPerTask = 16384;
  return std::max<int64_t>(
      1, kElementsPerTask / std::max<int64_t>(1, elements_per_row));
}

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_CPU_DISPATCH_H_
