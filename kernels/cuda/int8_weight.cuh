// Types and functions that the kernels of int8_weight.h share.
#ifndef WEFT_KERNELS_CUDA_INT8_WEIGHT_CUH_
#define WEFT_KERNELS_CUDA_INT8_WEIGHT_CUH_

#include "kernels/cpu/int8_rows.h"
#include "kernels/cuda/int8_weight.h"
#include "kernels/cuda/pack.cuh"

namespace weft::kernels::cuda {

// The number of integers that a lane loads at a time.
inline constexpr int kInt8Chunk = kAccessBytes;

union Int8Chunk {
  uint4 whole;
  unsigned words[kInt8Chunk / 4];
  int8_t bytes[kInt8Chunk];
};

// Returns whether rows begin at multiples of 16 bytes and their scales at even
// addresses.
inline bool HasWideRows(const Int8Weight& weight) {
  return IsWide<int8_t>(weight.rows_OB, weight.stride) &&
         weight.inputs % cpu::kInt8ScaleBytes == 0;
}

// Returns the bits of the scale of a group of a row. kWide requires
// HasWideRows.
template <bool kWide>
__device__ unsigned ScaleBitsOf(const int8_t* row, int64_t inputs,
                                int64_t group) {
  const int8_t* at = row + inputs + group * cpu::kInt8ScaleBytes;
  if constexpr (kWide) return *reinterpret_cast<const uint16_t*>(at);
  const auto* bytes = reinterpret_cast<const uint8_t*>(at);
  return bytes[0] | static_cast<unsigned>(bytes[1]) << 8;
}
__device__ inline float ScaleOf(unsigned bits) {
  return __uint_as_float(bits << 16);
}
template <bool kWide>
__device__ float ScaleOf(const int8_t* row, int64_t inputs, int64_t group) {
  return ScaleOf(ScaleBitsOf<kWide>(row, inputs, group));
}

}  // namespace weft::kernels::cuda

#endif  // WEFT_KERNELS_CUDA_INT8_WEIGHT_CUH_
