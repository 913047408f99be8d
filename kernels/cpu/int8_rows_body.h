// Implements quantize_row and widen_int8_row of kernels.h. Compiled only in
// table_*.cc.
#ifndef WEFT_KERNELS_CPU_INT8_ROWS_BODY_H_
#define WEFT_KERNELS_CPU_INT8_ROWS_BODY_H_

#include <cstdint>

#include "kernels/cpu/int8_rows.h"
#include "kernels/cpu/simd.h"

namespace weft::kernels::cpu::WEFT_KERNEL_ISA {
namespace {

// Returns the scale at `bytes`, which may have any alignment.
WEFT_INLINE float Int8ScaleAt(const int8_t* bytes) {
  uint16_t half;
  __builtin_memcpy(&half, bytes, sizeof(half));
  return __builtin_bit_cast(float, uint32_t{half} << 16);
}

// Returns the scale of the group to which input `i` belongs.
WEFT_INLINE float Int8Scale(const int8_t* row, int64_t inputs, int64_t i) {
  return Int8ScaleAt(row + inputs + i / kInt8Group * kInt8ScaleBytes);
}

// Returns the bits of the largest |x| of a group. The bits of positive floats,
// read as integers, sort like the floats, with infinity and then NaN last.
WEFT_INLINE uint32_t LargestBits(const float* x, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, x[i]) & 0x7fffffffU;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Returns the bits of the smallest bf16 number that is at least `largest` / 127
// and a normal number.
WEFT_INLINE uint16_t ScaleBits(float largest) {
  constexpr float kSmallestNormal = 0x1p-126f;
  float scale = largest / 127;
  scale = scale > kSmallestNormal ? scale : kSmallestNormal;
  return (uint16_t)((__builtin_bit_cast(uint32_t, scale) + 0xffffU) >> 16);
}

bool QuantizeRow(const float* x, int64_t inputs, int8_t* row) {
  constexpr uint32_t kInfinity = 0x7f800000U;
  // Adding 1.5 * 2^23 to a number rounds the number to an integer. The sum's
  // lowest bits hold this integer.
  constexpr float kRounder = 0x1.8p23f;
  int8_t* scales = row + inputs;
  for (int64_t begin = 0; begin < inputs; begin += kInt8Group) {
    const int64_t rest = inputs - begin;
    const int64_t count = rest < kInt8Group ? rest : kInt8Group;
    const uint32_t largest = LargestBits(x + begin, count);
    if (largest >= kInfinity) return false;
    const uint16_t half = ScaleBits(__builtin_bit_cast(float, largest));
    __builtin_memcpy(scales, &half, sizeof(half));
    scales += kInt8ScaleBytes;
    const float scale = __builtin_bit_cast(float, uint32_t{half} << 16);
    for (int64_t i = begin; i < begin + count; ++i) {
      row[i] = (int8_t) __builtin_bit_cast(int32_t, x[i] / scale + kRounder);
    }
  }
  return true;
}

void WidenInt8Row(const int8_t* row, int64_t inputs, int64_t begin, int64_t end,
                  float* out) {
  for (int64_t i = begin; i < end;) {
    const int64_t next = (i / kInt8Group + 1) * kInt8Group;
    const int64_t stop = next < end ? next : end;
    const float scale = Int8Scale(row, inputs, i);
    for (; i < stop; ++i) out[i - begin] = (float)row[i] * scale;
  }
}

}  // namespace
}  // namespace weft::kernels::cpu::WEFT_KERNEL_ISA

#endif  // WEFT_KERNELS_CPU_INT8_ROWS_BODY_H_
