#include "src/weights/float_convert.h"

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

}  // namespace weft::weights
