// Widens MXFP4: blocks of 32 values of 4 bits (one sign, two exponent, one
// mantissa bit). The values of a block share a scale, a power of two.
// Torch-free.
#ifndef WEFT_SRC_WEIGHTS_MXFP4_H_
#define WEFT_SRC_WEIGHTS_MXFP4_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace weft::weights {

inline constexpr int64_t kMxfp4Block = 32;

// Widens N blocks. A byte has two values, the first one in its low bits. The
// scale of byte s is 2^(s - 127).
// Shapes:  blocks [N, 16], scales [N], values [N, 32].
// Errors:  INVALID_ARGUMENT for a scale of 255, which stands for NaN.
// Threads: any.   Source: OCP Microscaling Formats 1.0.
[[nodiscard]] absl::Status WidenMxfp4(absl::Span<const std::byte> blocks,
                                      absl::Span<const std::byte> scales,
                                      absl::Span<float> values);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_MXFP4_H_
