#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/lse_merge.h"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

// `lanes` adjacent threads compute one row. `lanes` is a power of two and at
// most a warp.
template <typename T, int kN>
__global__ void __launch_bounds__(kThreads)
    LseMergeKernel(int64_t num_rows, int head_features, int lanes,
                   const T* part_NC, const float* part_lse_N, T* out_NC,
                   float* lse_N) {
  const int64_t thread =
      static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = thread / lanes;
  const int lane = static_cast<int>(thread % lanes);
  const bool is_row = row < num_rows;
  const float theirs = is_row ? part_lse_N[row] : -INFINITY;
  const float ours = is_row ? lse_N[row] : -INFINITY;
  // All lanes of a row must read the old lse before lane 0 overwrites it.
  __syncwarp();
  // A part without keys changes nothing. If `out` has no keys either, the code
  // below would compute -inf minus -inf, which is NaN.
  if (theirs == -INFINITY) return;
  // fmaxf ignores a NaN, but our_share or their_share is then NaN, and so are
  // the results.
  const float high = fmaxf(ours, theirs);
  // Computes the weights from `sum` and not from the new lse, because a large
  // lse has a large rounding error.
  const float our_share = expf(ours - high);
  const float their_share = expf(theirs - high);
  const float sum = our_share + their_share;
  const float our_weight = our_share / sum;
  const float their_weight = their_share / sum;
  if (lane == 0) lse_N[row] = high + logf(sum);
  const T* part = part_NC + row * head_features;
  T* out = out_NC + row * head_features;
  for (int c = lane * kN; c < head_features; c += lanes * kN) {
    const auto other = LoadPack<kN>(part + c);
    auto merged = LoadPack<kN>(out + c);
#pragma unroll
    for (int k = 0; k < kN; ++k) {
      merged.Set(k, merged[k] * our_weight + other[k] * their_weight);
    }
    StorePack(merged, out + c);
  }
}

}  // namespace

cudaError_t LseMergeRows(DType dtype, int64_t num_rows, int64_t head_features,
                         const void* part_NC, const float* part_lse_N,
                         void* out_NC, float* lse_N, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  return WithType(dtype, [&]<typename T>(const T*) {
    const bool is_wide =
        IsWide<T>(part_NC, head_features) && IsWide<T>(out_NC, head_features);
    return WithWidth<T>(is_wide, [&](auto width) {
      constexpr int kN = decltype(width)::value;
      const int lanes = LanesOf(head_features / kN);
      return Launch(LseMergeKernel<T, kN>, CeilDiv(num_rows * lanes, kThreads),
                    1, kThreads, stream, num_rows, head_features, lanes,
                    static_cast<const T*>(part_NC), part_lse_N,
                    static_cast<T*>(out_NC), lse_N);
    });
  });
}

}  // namespace weft::kernels::cuda
