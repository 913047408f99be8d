// Types and functions that the kernels of int8_weight.h share.
#ifndef WEFT_KERNELS_CUDA_INT8_WEIGHT_CUH_
#define WEFT_KERNELS_CUDA_INT8_WEIGHT_CUH_

#include "kernels/cpu/int8_rows.h"
#include "kernels/cuda/int8_weight.h"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {

// The number of integers that a lane loads at a time. The last chunk of a row
// may reach into the scales, which follow the integers.
inline constexpr int kInt8Chunk = kAccessBytes;

union Int8Chunk {
  uint4 whole;
  unsigned words[kInt8Chunk / 4];
};

// Returns the bits of the scale of a group of a row.
__device__ inline unsigned ScaleBitsOf(const int8_t* row, int64_t inputs,
                                       int64_t group) {
  return *reinterpret_cast<const uint16_t*>(row + inputs +
                                            group * cpu::kInt8ScaleBytes);
}
__device__ inline float ScaleOf(unsigned bits) {
  return __uint_as_float(bits << 16);
}
}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_INT8_WEIGHT_CUH_
