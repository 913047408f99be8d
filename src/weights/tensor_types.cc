#include "src/weights/tensor_types.h"

#include <limits>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace weft::weights {

const char* ScalarTypeName(ScalarType type) {
  constexpr const char* kNames[] = {"BOOL", "U8",  "I8",  "U16", "I16",
                                    "U32",  "I32", "U64", "I64", "F16",
                                    "BF16", "F32", "F64"};
  return kNames[static_cast<int>(type)];
}

size_t ScalarTypeBytes(ScalarType type) {
  constexpr size_t kBytes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8};
  return kBytes[static_cast<int>(type)];
}

std::string ShapeString(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string QuotedTensor(absl::string_view name) {
  return absl::StrCat(
      "tensor '", absl::CHexEscape(name.substr(0, kMaxTensorNameBytes)), "'");
}

std::string TensorNameProblem(absl::string_view name) {
  if (name.empty()) return "has a tensor without a name";
  if (name.size() > kMaxTensorNameBytes) {
    return absl::StrCat("has a name of ", name.size(), " bytes > limit ",
                        kMaxTensorNameBytes);
  }
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      return "has a control character in its name";
    }
    if (static_cast<unsigned char>(c) > 0x7f) {
      return "has a name that is not ASCII";
    }
  }
  return "";
}

absl::StatusOr<uint64_t> DeclaredBytes(absl::string_view name, ScalarType dtype,
                                       absl::Span<const uint64_t> shape) {
  constexpr uint64_t kMax = std::numeric_limits<int64_t>::max();
  uint64_t bytes = ScalarTypeBytes(dtype);
  for (const uint64_t size : shape) {
    // Refuses a huge size even if a later size is zero.
    if (size > kMax || (size != 0 && bytes > kMax / size)) {
      return absl::InvalidArgumentError(absl::StrCat(
          QuotedTensor(name), " has a shape of more than 2^63 bytes"));
    }
    bytes *= size;
  }
  return bytes;
}

}  // namespace weft::weights
