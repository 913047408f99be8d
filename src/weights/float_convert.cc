#include "src/weights/float_convert.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace weft::weights {
namespace {

// Converts each element of a tensor. memcpy reads the elements, because they
// may lie at any address.
template <float (*kConvert)(uint16_t)>
void ConvertAll(absl::Span<const std::byte> bytes,
                absl::Span<float> destination) {
  for (size_t i = 0; i < destination.size(); ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
    destination[i] = kConvert(bits);
  }
}

constexpr float kValues[] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                             4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                             -2.0F, -3.0F, -4.0F, -6.0F};
constexpr int kScaleBias = 127;
constexpr int kNanScale = 255;
constexpr size_t kMxfp4BlockBytes = kMxfp4Block / 2;

}  // namespace

absl::Status CopyToFloats(const TensorView& tensor,
                          absl::Span<float> destination) {
  switch (tensor.dtype) {
    case ScalarType::kF32:
      if (!destination.empty()) {
        std::memcpy(destination.data(), tensor.bytes.data(),
                    destination.size() * sizeof(float));
      }
      return absl::OkStatus();
    case ScalarType::kF64:
      for (size_t i = 0; i < destination.size(); ++i) {
        double value = 0;
        std::memcpy(&value, tensor.bytes.data() + i * sizeof(value),
                    sizeof(value));
        destination[i] = static_cast<float>(value);
      }
      return absl::OkStatus();
    case ScalarType::kF16:
      ConvertAll<F16ToFloat>(tensor.bytes, destination);
      return absl::OkStatus();
    case ScalarType::kBf16:
      ConvertAll<Bf16ToFloat>(tensor.bytes, destination);
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("dtype ", ScalarTypeName(tensor.dtype),
                       " is not one of F64, F32, F16, BF16"));
  }
}

absl::Status WidenMxfp4(absl::Span<const std::byte> blocks,
                        absl::Span<const std::byte> scales,
                        absl::Span<float> values) {
  for (size_t block = 0; block < scales.size(); ++block) {
    const int exponent = std::to_integer<int>(scales[block]);
    if (exponent == kNanScale) {
      return absl::InvalidArgumentError(absl::StrCat("MXFP4 block ", block,
                                                     " has scale ", kNanScale,
                                                     ", which stands for NaN"));
    }
    const float scale = std::ldexp(1.0F, exponent - kScaleBias);
    const std::byte* bytes = blocks.data() + block * kMxfp4BlockBytes;
    float* to = values.data() + block * kMxfp4Block;
    for (size_t i = 0; i < kMxfp4BlockBytes; ++i) {
      const auto pair = std::to_integer<unsigned>(bytes[i]);
      to[2 * i] = kValues[pair & 0xF] * scale;
      to[2 * i + 1] = kValues[pair >> 4] * scale;
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::weights
