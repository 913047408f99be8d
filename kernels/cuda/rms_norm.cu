#include "kernels/cuda/device.cuh"
#include "kernels/cuda/rms_norm.h"

namespace weft::kernels::cuda {
namespace {

// One block per row: it reads the row twice, the second time from the cache.
template <typename T, typename W>
__global__ void RmsNormKernel(const T* x_TD, int64_t x_stride,
                              const W* weight_D, int64_t features, float eps,
                              T* y_TD, int64_t y_stride) {
  const int64_t row = blockIdx.x;
  const T* x = x_TD + row * x_stride;
  T* y = y_TD + row * y_stride;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < features; i += blockDim.x) {
    const float v = ToFloat(x[i]);
    squares += v * v;
  }
  squares = BlockReduce(squares, Add());
  const float inverse = rsqrtf(squares / static_cast<float>(features) + eps);
  for (int64_t i = threadIdx.x; i < features; i += blockDim.x) {
    Store(ToFloat(x[i]) * inverse * ToFloat(weight_D[i]), y + i);
  }
}

// With d = dy * weight and n = x * inverse: dx += (d - n mean(d n)) * inverse.
template <typename T, typename W>
__global__ void RmsNormBackwardKernel(const T* dy_TD, int64_t dy_stride,
                                      const T* x_TD, int64_t x_stride,
                                      const W* weight_D, int64_t features,
                                      float eps, T* dx_TD, int64_t dx_stride) {
  const int64_t row = blockIdx.x;
  const T* dy = dy_TD + row * dy_stride;
  const T* x = x_TD + row * x_stride;
  T* dx = dx_TD + row * dx_stride;
  float squares = 0;
  float dot = 0;
  for (int64_t i = threadIdx.x; i < features; i += blockDim.x) {
    const float v = ToFloat(x[i]);
    squares += v * v;
    dot += ToFloat(dy[i]) * ToFloat(weight_D[i]) * v;
  }
  squares = BlockReduce(squares, Add());
  dot = BlockReduce(dot, Add());
  const auto count = static_cast<float>(features);
  const float inverse = rsqrtf(squares / count + eps);
  const float mean = dot * inverse / count;
  for (int64_t i = threadIdx.x; i < features; i += blockDim.x) {
    const float d = ToFloat(dy[i]) * ToFloat(weight_D[i]);
    const float n = ToFloat(x[i]) * inverse;
    Store(ToFloat(dx[i]) + (d - n * mean) * inverse, dx + i);
  }
}

// Calls run(T*, W*) with the types of the rows and of the weight.
template <typename Run>
cudaError_t WithTypes(const RmsNormRows& rows, Run run) {
  const auto* f32 = static_cast<const float*>(nullptr);
  const auto* bf16 = static_cast<const __nv_bfloat16*>(nullptr);
  if (rows.dtype == DType::kBf16) {
    return rows.weight_dtype == DType::kBf16 ? run(bf16, bf16) : run(bf16, f32);
  }
  return rows.weight_dtype == DType::kF32 ? run(f32, f32)
                                          : cudaErrorInvalidValue;
}

}  // namespace

cudaError_t RmsNorm(const RmsNormRows& rows, void* y_TD, int64_t y_stride,
                    cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.features == 0) return cudaSuccess;
  return WithTypes(rows, [&]<typename T, typename W>(const T*, const W*) {
    return Launch(RmsNormKernel<T, W>, rows.num_rows, 1,
                  RowThreads(rows.features), stream,
                  static_cast<const T*>(rows.x_TD), rows.x_stride,
                  static_cast<const W*>(rows.weight_D), rows.features, rows.eps,
                  static_cast<T*>(y_TD), y_stride);
  });
}

cudaError_t RmsNormBackward(const RmsNormRows& rows, const void* dy_TD,
                            int64_t dy_stride, void* dx_TD, int64_t dx_stride,
                            cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.features == 0) return cudaSuccess;
  return WithTypes(rows, [&]<typename T, typename W>(const T*, const W*) {
    return Launch(RmsNormBackwardKernel<T, W>, rows.num_rows, 1,
                  RowThreads(rows.features), stream,
                  static_cast<const T*>(dy_TD), dy_stride,
                  static_cast<const T*>(rows.x_TD), rows.x_stride,
                  static_cast<const W*>(rows.weight_D), rows.features, rows.eps,
                  static_cast<T*>(dx_TD), dx_stride);
  });
}

}  // namespace weft::kernels::cuda
