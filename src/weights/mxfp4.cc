#include "src/weights/mxfp4.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace weft::weights {
namespace {

constexpr float kValues[] = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                             4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                             -2.0F, -3.0F, -4.0F, -6.0F};
constexpr int kScaleBias = 127;
constexpr int kNanScale = 255;
constexpr size_t kBlockBytes = kMxfp4Block / 2;

}  // namespace

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
    const std::byte* bytes = blocks.data() + block * kBlockBytes;
    float* to = values.data() + block * kMxfp4Block;
    for (size_t i = 0; i < kBlockBytes; ++i) {
      const auto pair = std::to_integer<unsigned>(bytes[i]);
      to[2 * i] = kValues[pair & 0xF] * scale;
      to[2 * i + 1] = kValues[pair >> 4] * scale;
    }
  }
  return absl::OkStatus();
}

}  // namespace weft::weights
