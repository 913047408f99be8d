#include <limits>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/rotary.h"

namespace weft::kernels::cuda {
namespace {

// One block per token: a thread takes pairs of neighbouring features, head
// after head.
template <typename T>
__global__ void RotaryKernel(RotaryHeads heads, bool inverse) {
  const int64_t token = blockIdx.x;
  T* x = static_cast<T*>(heads.x_TMC) + token * heads.token_stride;
  const int64_t angles = heads.positions_T[token] * heads.half_features;
  const int half = static_cast<int>(heads.half_features);
  const int pairs = static_cast<int>(heads.num_heads) * half;
  for (int i = static_cast<int>(threadIdx.x); i < pairs;
       i += static_cast<int>(blockDim.x)) {
    const int head = i / half;
    const int c = i % half;
    const float cos = heads.cos_PC[angles + c];
    const float sin =
        inverse ? -heads.sin_PC[angles + c] : heads.sin_PC[angles + c];
    T* first = x + head * heads.head_stride + c;
    T* second = first + half;
    const float a = ToFloat(*first);
    const float b = ToFloat(*second);
    Store(a * cos - b * sin, first);
    Store(b * cos + a * sin, second);
  }
}

}  // namespace

cudaError_t Rotary(const RotaryHeads& heads, bool inverse,
                   cudaStream_t stream) {
  const int64_t pairs = heads.num_heads * heads.half_features;
  if (heads.num_tokens == 0 || pairs == 0) return cudaSuccess;
  // The index of a pair may pass the last one by a block.
  if (pairs > std::numeric_limits<int>::max() - 1024) {
    return cudaErrorInvalidValue;
  }
  const auto kernel = heads.dtype == DType::kBf16 ? RotaryKernel<__nv_bfloat16>
                                                  : RotaryKernel<float>;
  return Launch(kernel, heads.num_tokens, 1, RowThreads(pairs), stream, heads,
                inverse);
}

}  // namespace weft::kernels::cuda
