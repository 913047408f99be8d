#include "kernels/cuda/device.cuh"
#include "kernels/cuda/launch.cuh"
#include "tests/bench/kernels_cuda/bench.h"
#include "tests/bench/kernels_cuda/peer_passes.h"

namespace weft::kernels::cuda::bench {
namespace {

constexpr unsigned kThreads = 256;

__device__ int64_t Index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__global__ void MaskKernel(int64_t count, int64_t num_columns,
                           int64_t rows_each, const int32_t* adapter_C,
                           const float* scale_C, __nv_bfloat16* x_TC) {
  const int64_t i = Index();
  if (i >= count) return;
  const int64_t c = i % num_columns;
  const bool is_own = adapter_C[c] == i / num_columns / rows_each;
  Store(is_own ? scale_C[c] * ToFloat(x_TC[i]) : 0.0F, x_TC + i);
}

}  // namespace

void MaskColumns(int64_t num_rows, int64_t num_columns, int64_t rows_each,
                 const int32_t* adapter_C, const float* scale_C,
                 uint16_t* x_TC) {
  const int64_t count = num_rows * num_columns;
  Check(Launch(MaskKernel, CeilDiv(count, kThreads), 1, kThreads, nullptr,
               count, num_columns, rows_each, adapter_C, scale_C,
               reinterpret_cast<__nv_bfloat16*>(x_TC)));
}

}  // namespace weft::kernels::cuda::bench
