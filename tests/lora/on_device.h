// The device for tests of the CUDA path. In a build without CUDA it is the
// host, and the kernels run there.
#ifndef WEFT_TESTS_LORA_ON_DEVICE_H_
#define WEFT_TESTS_LORA_ON_DEVICE_H_

#include <ATen/ATen.h>

#include "src/ops/cuda_dispatch.h"
#include "tests/support/tensors_near.h"

namespace weft::lora {

inline CUstream_st* Stream() {
  if constexpr (ops::kHasCudaKernels) return ops::cuda::CurrentStream();
  return nullptr;
}

inline at::Device TheDevice() {
  return ops::kHasCudaKernels ? at::kCUDA : at::kCPU;
}

inline at::Tensor OnDevice(const at::Tensor& x) {
  return x.to(TheDevice(), at::kBFloat16);
}

// Compares `actual` with `expected`, which is f64 on the host. `actual` is
// bf16, or it is f32 and holds sums of bf16 numbers.
inline void ExpectNearInBf16(const at::Tensor& actual,
                             const at::Tensor& expected, const char* what) {
  // Sums are f32. Values are rounded when they are stored.
  ExpectNear(actual, expected, kEpsilonBf16, 1, what,
             /*least=*/0);
}

}  // namespace weft::lora

#endif  // WEFT_TESTS_LORA_ON_DEVICE_H_
