#include "kernels/cuda/device.cuh"
#include "kernels/cuda/lse_merge.h"

namespace weft::kernels::cuda {
namespace {

template <typename T>
__global__ void LseMergeKernel(int64_t head_features, const T* part_NC,
                               const float* part_lse_N, T* out_NC,
                               float* lse_N) {
  const int64_t row = blockIdx.x;
  const float ours = lse_N[row];
  const float theirs = part_lse_N[row];
  // Keeps -inf minus -inf, which is NaN, out of a row without keys.
  if (theirs == -INFINITY) return;
  // fmaxf passes over NaN, the shares below do not.
  const float high = fmaxf(ours, theirs);
  // Weights from the sum, not from the new lse: that one is rounded to its own
  // magnitude, which may be large.
  const float our_share = expf(ours - high);
  const float their_share = expf(theirs - high);
  const float sum = our_share + their_share;
  const float our_weight = our_share / sum;
  const float their_weight = their_share / sum;
  const T* part = part_NC + row * head_features;
  T* out = out_NC + row * head_features;
  for (int64_t c = threadIdx.x; c < head_features; c += blockDim.x) {
    Store(ToFloat(out[c]) * our_weight + ToFloat(part[c]) * their_weight,
          out + c);
  }
  // All threads have read the old one.
  __syncthreads();
  if (threadIdx.x == 0) lse_N[row] = high + logf(sum);
}

template <typename T>
cudaError_t Merge(int64_t num_rows, int64_t head_features, const void* part_NC,
                  const float* part_lse_N, void* out_NC, float* lse_N,
                  cudaStream_t stream) {
  return Launch(LseMergeKernel<T>, num_rows, 1, RowThreads(head_features),
                stream, head_features, static_cast<const T*>(part_NC),
                part_lse_N, static_cast<T*>(out_NC), lse_N);
}

}  // namespace

cudaError_t LseMergeRows(DType dtype, int64_t num_rows, int64_t head_features,
                         const void* part_NC, const float* part_lse_N,
                         void* out_NC, float* lse_N, cudaStream_t stream) {
  if (num_rows == 0) return cudaSuccess;
  const auto merge =
      dtype == DType::kBf16 ? Merge<__nv_bfloat16> : Merge<float>;
  return merge(num_rows, head_features, part_NC, part_lse_N, out_NC, lse_N,
               stream);
}

}  // namespace weft::kernels::cuda
