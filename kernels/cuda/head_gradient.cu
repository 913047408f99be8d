#include "kernels/cuda/head_gradient.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

// A block computes some features of one row. Each of its threads computes kN
// adjacent features.
template <typename T, int kN>
__global__ void __launch_bounds__(kThreads)
    HeadGradientKernel(HeadGradientRows rows) {
  const int64_t row = blockIdx.x;
  const int64_t i =
      (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kN;
  if (i >= rows.hidden) return;
  auto sums = LoadPack<kN>(rows.projection_RH + row * rows.hidden + i);
  const float factor = rows.factor_R[row] * rows.scale_R[row];
#pragma unroll
  for (int k = 0; k < kN; ++k) sums.elements[k] *= factor;
  const T* weight_VH = static_cast<const T*>(rows.weight_VH);
  const int64_t end = rows.row_offsets[row + 1];
  for (int64_t e = rows.row_offsets[row]; e < end; ++e) {
    const auto weight =
        LoadPack<kN>(weight_VH + rows.targets_E[e] * rows.hidden + i);
    const float coefficient = rows.coefficient_E[e];
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      sums.elements[k] += coefficient * weight[k];
    }
  }
  Pack<T, kN> out;
#pragma unroll
  for (int k = 0; k < kN; ++k) out.Set(k, sums[k]);
  StorePack(out, static_cast<T*>(rows.out_RH) + row * rows.hidden + i);
}

}  // namespace

cudaError_t HeadGradient(const HeadGradientRows& rows, cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.hidden == 0) return cudaSuccess;
  return WithType(rows.dtype, [&]<typename T>(const T*) {
    const bool is_wide = IsWide<T>(rows.projection_RH, rows.hidden) &&
                         IsWide<T>(rows.weight_VH, rows.hidden) &&
                         IsWide<T>(rows.out_RH, rows.hidden);
    return WithWidth<T>(is_wide, [&](auto width) {
      constexpr int kN = decltype(width)::value;
      return Launch(HeadGradientKernel<T, kN>, rows.num_rows,
                    CeilDiv(rows.hidden, kN * kThreads), kThreads, stream,
                    rows);
    });
  });
}

}  // namespace weft::kernels::cuda
