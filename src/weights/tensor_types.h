// Describes a tensor in a file of any format by its dtype, shape and place.
// Also has the limits that all formats share. Torch-free.
#ifndef WEFT_SRC_WEIGHTS_TENSOR_TYPES_H_
#define WEFT_SRC_WEIGHTS_TENSOR_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft::weights {

inline constexpr size_t kMaxTensors = 100'000;
inline constexpr size_t kMaxTensorNameBytes = 512;
inline constexpr size_t kMaxTensorRank = 8;

enum class ScalarType : uint8_t {
  kBool,
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kU64,
  kI64,
  kF16,
  kBf16,
  kF32,
  kF64,
};

// Returns the safetensors name of the type, such as "BF16".
const char* ScalarTypeName(ScalarType type);
size_t ScalarTypeBytes(ScalarType type);

// A view of a tensor in memory that another object owns: row-major,
// little-endian, at any alignment.
struct TensorView {
  ScalarType dtype = ScalarType::kF32;
  std::vector<int64_t> shape;
  absl::Span<const std::byte> bytes;

  size_t num_elements() const { return bytes.size() / ScalarTypeBytes(dtype); }
};

// A tensor in a file, little-endian.
struct StoredTensor {
  ScalarType dtype = ScalarType::kF32;
  std::vector<int64_t> shape;
  uint64_t offset = 0;      // Bytes of the file before the first element.
  uint64_t size_bytes = 0;  // Implied by shape and dtype.
  bool row_major = true;    // If false, the tensor cannot be read.
};

// The tensors of one file by name.
using TensorDirectory = absl::btree_map<std::string, StoredTensor>;

// Returns the shape as text, such as "[2, 3]", for messages.
std::string ShapeString(absl::Span<const int64_t> shape);

// Returns the name with escapes and quotes, such as "tensor 'a'", for messages.
std::string QuotedTensor(absl::string_view name);

// Returns what is wrong with a tensor's name, such as "has a control character
// in its name". Returns an empty string if nothing is wrong.
std::string TensorNameProblem(absl::string_view name);

// Returns the number of bytes that shape and dtype imply. Errors:
// INVALID_ARGUMENT, which names the tensor, if the number is 2^63 or more.
absl::StatusOr<uint64_t> DeclaredBytes(absl::string_view name, ScalarType dtype,
                                       absl::Span<const uint64_t> shape);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_TYPES_H_
