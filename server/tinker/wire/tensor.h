// Reads the tensors of Tinker's messages. Makes sparse tensors dense. The
// caller limits NumValues of all of them, because a sparse tensor of a few
// bytes may claim a huge shape.
// Errors: INVALID_ARGUMENT, which names the tensor.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_WIRE_TENSOR_H_
#define WEFT_SERVER_TINKER_WIRE_TENSOR_H_

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/tinker/wire.pb.h"
#include "server/tinker/wire/fields.h"
#include "weft/v1/training.pb.h"

namespace weft::server::tinker {

static_assert(std::endian::native == std::endian::little,
              "raw values are copied, not swapped");

// The most values of all sparse tensors of a request, when they are dense.
inline constexpr int64_t kMaxDenseValues = int64_t{16} << 20;

// Returns the product of the shape, but at most kMaxDenseValues + 1. A negative
// size counts as too large.
int64_t NumValues(const Tensor& tensor);

// Returns K for a tensor [N, K], and 0 for a tensor with fewer dimensions.
absl::StatusOr<int64_t> TargetsPerToken(absl::string_view name,
                                        const Tensor& tensor);

// Returns the values as floats. The tensor may hold float32, int64 or int32.
absl::StatusOr<std::vector<float>> ReadFloats(absl::string_view name,
                                              const Tensor& tensor);

// Returns the tensor's whole numbers as raw uint32, little endian. A number
// that does not fit becomes the largest uint32, which is not a token id of any
// vocabulary.
absl::StatusOr<std::string> ReadIds(absl::string_view name,
                                    const Tensor& tensor);

// Converts a tensor of any number of dimensions to an input of a custom loss:
// float32 values, or whole numbers. A tensor without a shape gets none here.
absl::StatusOr<v1::CustomInput> ReadCustomInput(absl::string_view name,
                                                const Tensor& tensor);
// The cells of a tensor [N, K] that its message stores, row by row: all cells
// of a dense tensor, and those that a sparse one lists.
struct StoredCells {
  std::vector<int64_t> row_offsets;  // [N + 1].
  std::vector<int64_t> values;
};
// Returns the cells of a tensor of whole numbers. Errors: also if the tensor
// has not two dimensions, or its data do not fit its shape.
absl::StatusOr<StoredCells> ReadCells(absl::string_view name,
                                      const Tensor& tensor);

// Returns the tensor in the form that TensorFromJson reads. REQUIRES: its
// values are float32 or int32, and fit.
Json TensorToJson(const Tensor& tensor);

// Convert between values and their raw bytes, little endian. FromRaw drops the
// bytes of a part of a value.
template <typename T>
std::string ToRaw(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()),
          values.size() * sizeof(T)};
}
template <typename T>
std::vector<T> FromRaw(const std::string& bytes) {
  std::vector<T> values(bytes.size() / sizeof(T));
  if (values.empty()) return values;
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

// Reads {"data": [...]}. Optional fields are "dtype" ("float32" by default, or
// "int64"), "shape", and "sparse_crow_indices" with "sparse_col_indices".
absl::StatusOr<Tensor> TensorFromJson(absl::string_view name, const Json& json);

}  // namespace weft::server::tinker

#endif  // WEFT_SERVER_TINKER_WIRE_TENSOR_H_
