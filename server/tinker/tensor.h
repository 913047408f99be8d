// Tensors of Tinker's messages.
// Errors: INVALID_ARGUMENT naming the tensor.
// Units: a sparse tensor is made dense; what that takes is bounded by
// kMaxDenseValues, since a few bytes may claim any shape.
// Threads: any.
#ifndef WEFT_SERVER_TINKER_TENSOR_H_
#define WEFT_SERVER_TINKER_TENSOR_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/tinker/fields.h"
#include "server/tinker/wire.pb.h"

namespace weft::tinker {

inline constexpr int64_t kMaxDenseValues = int64_t{16} << 20;

// K of a tensor [N, K]; 0 for [N].
[[nodiscard]] absl::StatusOr<int64_t> TargetsPerToken(absl::string_view name,
                                                      const Tensor& tensor);

// The values as floats, whatever their type.
[[nodiscard]] absl::StatusOr<std::vector<float>> ReadFloats(
    absl::string_view name, const Tensor& tensor);

// Whole numbers as raw uint32, little endian. A number that is no uint32
// becomes the largest one, which no vocabulary has.
[[nodiscard]] absl::StatusOr<std::string> ReadIds(absl::string_view name,
                                                  const Tensor& tensor);

[[nodiscard]] std::string RawFloats(const std::vector<float>& values);

// Reads {"data": [...], "dtype": "int64" or "float32"}, with "shape",
// "sparse_crow_indices" and "sparse_col_indices" where they are there.
[[nodiscard]] absl::StatusOr<Tensor> TensorFromJson(absl::string_view name,
                                                    const Json& json);

}  // namespace weft::tinker

#endif  // WEFT_SERVER_TINKER_TENSOR_H_
