#include "kernels/cuda/delta/gated_delta.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kNormWarps = kThreads / kWarp;

template <typename T>
__device__ T* HeadOf(const DeltaHeads& heads, int64_t row, int64_t head) {
  return static_cast<T*>(heads.data) + row * heads.row_stride +
         head * heads.head_stride;
}

// Returns 1 / rms of a head. All lanes call it.
template <typename T>
__device__ float InverseRms(const GatedNormHeads& heads, const T* x) {
  float squares = 0;
  for (int64_t i = Lane(); i < heads.features; i += kWarp) {
    squares += ToFloat(x[i]) * ToFloat(x[i]);
  }
  return rsqrtf(WarpReduce(squares, Add()) /
                    static_cast<float>(heads.features) +
                heads.eps);
}

// A warp computes one head of one row.
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads)
    GatedNormKernel(GatedNormHeads heads, DeltaHeads y) {
  const int64_t index = int64_t{blockIdx.x} * kNormWarps + WarpIndex();
  if (index >= heads.num_rows * heads.num_heads) return;
  const int64_t row = index / heads.num_heads, head = index % heads.num_heads;
  const T* x = HeadOf<T>(heads.x, row, head);
  const T* z = HeadOf<T>(heads.z, row, head);
  const W* weight = static_cast<const W*>(heads.weight_V);
  T* to = HeadOf<T>(y, row, head);
  const float inverse = InverseRms(heads, x);
  for (int64_t i = Lane(); i < heads.features; i += kWarp) {
    const float gate = ToFloat(z[i]);
    Store(ToFloat(weight[i]) * ToFloat(x[i]) * inverse * gate /
              (1.0F + expf(-gate)),
          to + i);
  }
}

// With n = x / rms and d = dy weight silu(z): dx = (d - n mean(d n)) / rms.
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads)
    GatedNormBackwardKernel(GatedNormHeads heads, DeltaHeads dy, DeltaHeads dx,
                            DeltaHeads dz) {
  const int64_t index = int64_t{blockIdx.x} * kNormWarps + WarpIndex();
  if (index >= heads.num_rows * heads.num_heads) return;
  const int64_t row = index / heads.num_heads, head = index % heads.num_heads;
  const T* x = HeadOf<T>(heads.x, row, head);
  const T* z = HeadOf<T>(heads.z, row, head);
  const T* from = HeadOf<T>(dy, row, head);
  const W* weight = static_cast<const W*>(heads.weight_V);
  const float inverse = InverseRms(heads, x);
  const auto slope = [&](int64_t i, float* n) {
    *n = ToFloat(x[i]) * inverse;
    return ToFloat(from[i]) * ToFloat(weight[i]);
  };
  float dot = 0;
  for (int64_t i = Lane(); i < heads.features; i += kWarp) {
    float n;
    const float d = slope(i, &n), gate = ToFloat(z[i]);
    dot += d * n * gate / (1.0F + expf(-gate));
  }
  const float mean =
      WarpReduce(dot, Add()) / static_cast<float>(heads.features);
  for (int64_t i = Lane(); i < heads.features; i += kWarp) {
    float n;
    const float d = slope(i, &n), gate = ToFloat(z[i]);
    const float sigmoid = 1.0F / (1.0F + expf(-gate));
    Store((d * gate * sigmoid - n * mean) * inverse,
          HeadOf<T>(dx, row, head) + i);
    Store(d * n * sigmoid * (1.0F + gate * (1.0F - sigmoid)),
          HeadOf<T>(dz, row, head) + i);
  }
}

}  // namespace

cudaError_t GatedNorm(const GatedNormHeads& heads, const DeltaHeads& y,
                      cudaStream_t stream) {
  if (heads.num_rows == 0 || heads.num_heads == 0) return cudaSuccess;
  return WithTypes(heads.dtype, heads.weight_dtype,
                   [&]<typename T, typename W>(const T*, const W*) {
                     return Launch(
                         GatedNormKernel<T, W>,
                         CeilDiv(heads.num_rows * heads.num_heads, kNormWarps),
                         1, kThreads, stream, heads, y);
                   });
}

cudaError_t GatedNormBackward(const GatedNormHeads& heads, const DeltaHeads& dy,
                              const DeltaHeads& dx, const DeltaHeads& dz,
                              cudaStream_t stream) {
  if (heads.num_rows == 0 || heads.num_heads == 0) return cudaSuccess;
  return WithTypes(heads.dtype, heads.weight_dtype,
                   [&]<typename T, typename W>(const T*, const W*) {
                     return Launch(
                         GatedNormBackwardKernel<T, W>,
                         CeilDiv(heads.num_rows * heads.num_heads, kNormWarps),
                         1, kThreads, stream, heads, dy, dx, dz);
                   });
}

}  // namespace weft::kernels::cuda
