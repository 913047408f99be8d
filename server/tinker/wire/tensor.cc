#include "server/tinker/wire/tensor.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/wire/field_checks.h"
#include "src/base/status_macros.h"

namespace weft::server::tinker {
namespace {

template <typename T>
absl::StatusOr<std::vector<T>> Copy(absl::string_view name,
                                    const std::string& bytes) {
  if (bytes.size() % sizeof(T) != 0) {
    return BadField(name,
                    absl::StrCat("has ", bytes.size(),
                                 " bytes, must be a multiple of ", sizeof(T)));
  }
  return FromRaw<T>(bytes);
}

template <typename To, typename From>
absl::StatusOr<std::vector<To>> Convert(absl::string_view name,
                                        const std::string& bytes) {
  WEFT_ASSIGN_OR_RETURN(std::vector<From> values, Copy<From>(name, bytes));
  if constexpr (std::is_same_v<To, From>) {
    return values;
  } else {
    return std::vector<To>(values.begin(), values.end());
  }
}

// Returns the values that the message stores, in their order. A sparse tensor
// stores only some of its values.
template <typename To>
absl::StatusOr<std::vector<To>> StoredValues(absl::string_view name,
                                             const Tensor& tensor) {
  const std::string& bytes =
      tensor.has_sparse_csr() ? tensor.sparse_csr().values() : tensor.dense();
  switch (tensor.dtype()) {
    case DTYPE_FLOAT32:
      if constexpr (std::is_integral_v<To>) {
        return BadField(name, "must be of whole numbers");
      } else {
        return Convert<To, float>(name, bytes);
      }
    case DTYPE_INT64:
      return Convert<To, int64_t>(name, bytes);
    case DTYPE_INT32:
      return Convert<To, int32_t>(name, bytes);
    default:
      return BadField(name, "has a dtype other than float32, int64 and int32");
  }
}

// The indices of a sparse CSR tensor.
struct CsrIndices {
  std::vector<int64_t> rows;
  std::vector<int64_t> columns;
};

// Returns the indices of a tensor with `stored` values, if they fit its shape.
absl::StatusOr<CsrIndices> ReadIndices(absl::string_view name,
                                       const Tensor& tensor, size_t stored) {
  const SparseCsr& csr = tensor.sparse_csr();
  CsrIndices out;
  WEFT_ASSIGN_OR_RETURN(out.rows, Copy<int64_t>(name, csr.crow_indices()));
  WEFT_ASSIGN_OR_RETURN(out.columns, Copy<int64_t>(name, csr.col_indices()));
  if (tensor.shape_size() != 2 || out.columns.size() != stored ||
      out.rows.empty() ||
      std::cmp_not_equal(out.rows.size() - 1, tensor.shape(0)) ||
      out.rows.front() != 0 || std::cmp_not_equal(out.rows.back(), stored)) {
    return BadField(name, "has CSR indices that do not fit its shape");
  }
  // Rows that ascend to `stored` cannot end after it.
  if (!std::ranges::is_sorted(out.rows)) {
    return BadField(name, "has CSR rows that do not ascend");
  }
  for (const int64_t column : out.columns) {
    if (column < 0 || column >= tensor.shape(1)) {
      return BadField(name, "has a CSR index out of its shape");
    }
  }
  return out;
}

// Makes a sparse CSR tensor [N, K] dense. Cells without a value become 0.
template <typename To>
absl::StatusOr<std::vector<To>> Densify(absl::string_view name,
                                        const Tensor& tensor,
                                        const std::vector<To>& values) {
  const int64_t count = NumValues(tensor);
  if (count > kMaxDenseValues) {
    return BadField(name, absl::StrCat("has a shape of more than ",
                                       kMaxDenseValues, " values"));
  }
  WEFT_ASSIGN_OR_RETURN(const CsrIndices indices,
                        ReadIndices(name, tensor, values.size()));
  const auto width = static_cast<size_t>(tensor.shape(1));
  std::vector<To> dense(static_cast<size_t>(count));
  for (size_t row = 0; row + 1 < indices.rows.size(); ++row) {
    for (auto i = static_cast<size_t>(indices.rows[row]);
         std::cmp_less(i, indices.rows[row + 1]); ++i) {
      dense[row * width + static_cast<size_t>(indices.columns[i])] = values[i];
    }
  }
  return dense;
}

template <typename To>
absl::StatusOr<std::vector<To>> Values(absl::string_view name,
                                       const Tensor& tensor) {
  WEFT_ASSIGN_OR_RETURN(std::vector<To> values, StoredValues<To>(name, tensor));
  if (tensor.has_sparse_csr()) return Densify(name, tensor, values);
  return values;
}

// Reads the list `key` of a tensor in JSON. Returns its numbers as raw T.
template <typename T>
absl::StatusOr<std::string> RawNumbers(absl::string_view name, const Json& json,
                                       const char* key) {
  WEFT_ASSIGN_OR_RETURN(const Json* const list,
                        List(json, key, absl::StrCat(name, ".", key)));
  std::vector<T> numbers;
  numbers.reserve(list->size());
  for (const Json& value : *list) {
    if (!value.is_number() ||
        (std::is_integral_v<T> && !value.is_number_integer())) {
      return BadField(name, "has an entry that is not a number of its dtype");
    }
    numbers.push_back(value.get<T>());
  }
  return ToRaw(numbers);
}

}  // namespace

int64_t NumValues(const Tensor& tensor) {
  int64_t count = 1;
  for (const int64_t size : tensor.shape()) {
    if (size < 0 || size > kMaxDenseValues || count * size > kMaxDenseValues) {
      return kMaxDenseValues + 1;
    }
    count *= size;
  }
  return count;
}

absl::StatusOr<int64_t> TargetsPerToken(absl::string_view name,
                                        const Tensor& tensor) {
  if (tensor.shape_size() <= 1) return 0;
  if (tensor.shape_size() > 2) {
    return BadField(name, "has more than two dimensions");
  }
  const int64_t width = tensor.shape(1);
  if (width < 1 || width > kMaxDenseValues) {
    return BadField(name, absl::StrCat("has ", width, " targets per token"));
  }
  return width;
}

absl::StatusOr<std::vector<float>> ReadFloats(absl::string_view name,
                                              const Tensor& tensor) {
  return Values<float>(name, tensor);
}

absl::StatusOr<std::string> ReadIds(absl::string_view name,
                                    const Tensor& tensor) {
  WEFT_ASSIGN_OR_RETURN(const std::vector<int64_t> ids,
                        Values<int64_t>(name, tensor));
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  std::vector<uint32_t> out;
  out.reserve(ids.size());
  for (const int64_t id : ids) {
    out.push_back(std::in_range<uint32_t>(id) ? static_cast<uint32_t>(id)
                                              : kNone);
  }
  return ToRaw(out);
}

absl::StatusOr<v1::CustomInput> ReadCustomInput(absl::string_view name,
                                                const Tensor& tensor) {
  v1::CustomInput out;
  for (const int64_t size : tensor.shape()) {
    if (!std::in_range<uint32_t>(size)) {
      return BadField(name, absl::StrCat("has a dimension of size ", size));
    }
    out.add_shape(static_cast<uint32_t>(size));
  }
  if (tensor.dtype() == DTYPE_FLOAT32) {
    WEFT_ASSIGN_OR_RETURN(const std::vector<float> values,
                          ReadFloats(name, tensor));
    out.set_floats_le(ToRaw(values));
    return out;
  }
  WEFT_ASSIGN_OR_RETURN(const std::vector<int64_t> values,
                        Values<int64_t>(name, tensor));
  out.set_ints_le(ToRaw(values));
  return out;
}

absl::StatusOr<StoredCells> ReadCells(absl::string_view name,
                                      const Tensor& tensor) {
  StoredCells cells;
  WEFT_ASSIGN_OR_RETURN(cells.values, StoredValues<int64_t>(name, tensor));
  if (tensor.has_sparse_csr()) {
    WEFT_ASSIGN_OR_RETURN(CsrIndices indices,
                          ReadIndices(name, tensor, cells.values.size()));
    cells.row_offsets = std::move(indices.rows);
    return cells;
  }
  if (tensor.shape_size() != 2 ||
      std::cmp_not_equal(NumValues(tensor), cells.values.size())) {
    return BadField(name, "must have a shape [N, K] that its values fill");
  }
  for (int64_t row = 0; row <= tensor.shape(0); ++row) {
    cells.row_offsets.push_back(row * tensor.shape(1));
  }
  return cells;
}

Json TensorToJson(const Tensor& tensor) {
  const auto list = [](const auto& values) {
    return values.ok() ? Json(*values) : Json::array();
  };
  const bool is_float = tensor.dtype() == DTYPE_FLOAT32;
  Json out = {{"data", is_float ? list(StoredValues<float>("", tensor))
                                : list(StoredValues<int64_t>("", tensor))},
              {"dtype", is_float ? "float32" : "int64"},
              {"shape", std::vector<int64_t>(tensor.shape().begin(),
                                             tensor.shape().end())}};
  if (!tensor.has_sparse_csr()) return out;
  const SparseCsr& csr = tensor.sparse_csr();
  out["sparse_crow_indices"] = list(Copy<int64_t>("", csr.crow_indices()));
  out["sparse_col_indices"] = list(Copy<int64_t>("", csr.col_indices()));
  return out;
}

absl::StatusOr<Tensor> TensorFromJson(absl::string_view name,
                                      const Json& json) {
  if (!json.is_object()) return BadField(name, "must be an object");
  WEFT_ASSIGN_OR_RETURN(const std::string dtype,
                        Text(json, "dtype", "float32"));
  Tensor out;
  std::string raw;
  if (dtype == "int64") {
    out.set_dtype(DTYPE_INT64);
    WEFT_ASSIGN_OR_RETURN(raw, RawNumbers<int64_t>(name, json, "data"));
  } else if (dtype == "float32") {
    out.set_dtype(DTYPE_FLOAT32);
    WEFT_ASSIGN_OR_RETURN(raw, RawNumbers<float>(name, json, "data"));
  } else {
    return BadField(absl::StrCat(name, ".dtype"), "must be int64 or float32");
  }
  if (const Json* const shape = Find(json, "shape"); shape != nullptr) {
    WEFT_ASSIGN_OR_RETURN(const auto sizes, Int32List(*shape, "shape"));
    out.mutable_shape()->Add(sizes.begin(), sizes.end());
  }
  if (Find(json, "sparse_crow_indices") == nullptr) {
    out.set_dense(std::move(raw));
    return out;
  }
  SparseCsr* const csr = out.mutable_sparse_csr();
  csr->set_values(std::move(raw));
  WEFT_ASSIGN_OR_RETURN(*csr->mutable_crow_indices(),
                        RawNumbers<int64_t>(name, json, "sparse_crow_indices"));
  WEFT_ASSIGN_OR_RETURN(*csr->mutable_col_indices(),
                        RawNumbers<int64_t>(name, json, "sparse_col_indices"));
  return out;
}

}  // namespace weft::server::tinker
