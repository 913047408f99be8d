// Rows of weights in 8 bits.
//
// A row of I weights has I signed bytes q, and then a scale s in bf16 for each
// group of 64 adjacent weights. The last group may be shorter. A weight is q s.
// This product is exact in f32, because q has 7 significant bits and s has 8.
// Quantising rounds w / s to the nearest q, so w changes by at most s / 2.
// The scale s is m / 127 rounded up to bf16, where m is the largest |w| of the
// group. So s is at most (1 + 2^-7) m / 127. If m / 127 is below the smallest
// normal f32, s is the smallest normal f32 instead.
#ifndef WEFT_KERNELS_CPU_INT8_ROWS_H_
#define WEFT_KERNELS_CPU_INT8_ROWS_H_

#include <cstdint>

namespace weft::kernels::cpu {

inline constexpr int64_t kInt8Group = 64;
inline constexpr int64_t kInt8ScaleBytes = 2;

// Returns the number of bytes of a row of `inputs` weights.
constexpr int64_t Int8RowBytes(int64_t inputs) {
  return inputs + (inputs + kInt8Group - 1) / kInt8Group * kInt8ScaleBytes;
}

// Returns the distance in bytes between the rows of a weight in memory. All
// rows begin at multiples of 16 bytes, because the kernels for CUDA load 16
// bytes at a time.
constexpr int64_t Int8RowStride(int64_t inputs) {
  constexpr int64_t kAlignment = 16;
  return (Int8RowBytes(inputs) + kAlignment - 1) / kAlignment * kAlignment;
}

// Returns the number of weights in a row of `bytes` bytes. Inverts
// Int8RowBytes.
constexpr int64_t Int8RowInputs(int64_t bytes) {
  constexpr int64_t kGroupBytes = kInt8Group + kInt8ScaleBytes;
  return bytes - (bytes + kGroupBytes - 1) / kGroupBytes * kInt8ScaleBytes;
}

}  // namespace weft::kernels::cpu

#endif  // WEFT_KERNELS_CPU_INT8_ROWS_H_
