// bf16 on the host; see cuda_runtime_api.h.
#ifndef WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_BF16_H_
#define WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_BF16_H_

#include <bit>
#include <cstdint>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Rounds to nearest, ties to even. NaN stays NaN.
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  if (x != x) return {0x7FFF};
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounding = 0x7FFF + (bits >> 16 & 1);
  return {static_cast<uint16_t>((bits + rounding) >> 16)};
}

#endif  // WEFT_TESTS_SUPPORT_CUDA_ON_HOST_CUDA_BF16_H_
