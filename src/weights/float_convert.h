// Converts float16, bfloat16 and MXFP4 to float32, exactly and without
// LibTorch.
#ifndef WEFT_SRC_WEIGHTS_FLOAT_CONVERT_H_
#define WEFT_SRC_WEIGHTS_FLOAT_CONVERT_H_

#include <bit>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {

// Returns the f32 whose upper half is `bits`.
inline float Bf16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Returns the value of an IEEE 754 binary16, including infinities, NaN and
// denormals.
inline float F16ToFloat(uint16_t bits) {
  constexpr uint32_t kExponentBias = 127 - 15;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign == 0 ? magnitude : -magnitude;
  }
  const uint32_t wide_exponent =
      exponent == 0x1fu ? 0xffu : exponent + kExponentBias;
  return std::bit_cast<float>(sign | (wide_exponent << 23) | (mantissa << 13));
}

// Copies a tensor of F64 (rounded), F32, F16 or BF16 into floats, in row-major
// order. Shapes:
// `destination` has as many elements as the tensor. Errors: INVALID_ARGUMENT
// for another dtype.
absl::Status CopyToFloats(const TensorView& tensor,
                          absl::Span<float> destination);

inline constexpr int64_t kMxfp4Block = 32;

// Widens N blocks of MXFP4. A block has 32 values of 4 bits (one sign, two
// exponent, one mantissa bit), which share a scale, a power of two. A byte has
// two values, the first one in its low bits. The scale of byte s is 2^(s -
// 127).
// Shapes:  blocks [N, 16], scales [N], values [N, 32].
// Errors:  INVALID_ARGUMENT for a scale of 255, which stands for NaN.
// Threads: any.   Source: OCP Microscaling Formats 1.0.
absl::Status WidenMxfp4(absl::Span<const std::byte> blocks,
                        absl::Span<const std::byte> scales,
                        absl::Span<float> values);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_FLOAT_CONVERT_H_
