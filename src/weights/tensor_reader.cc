#include "src/weights/tensor_reader.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/status_macros.h"

namespace weft::weights {
namespace {

// One copy: large enough to hide its overhead, small enough that the staging
// of a conversion or of a transfer to a device stays small.
constexpr int64_t kBlockBytes = int64_t{4} << 20;

std::optional<at::ScalarType> FloatingType(ScalarType type) {
  switch (type) {
    case ScalarType::kF32:
      return at::kFloat;
    case ScalarType::kF16:
      return at::kHalf;
    case ScalarType::kBf16:
      return at::kBFloat16;
    default:
      return std::nullopt;
  }
}

// Tensors of one file, read as rows of equal size.
struct Source {
  const std::byte* data;
  at::ScalarType dtype;
  int64_t row_bytes;
};

// Copies rows [begin, end) of `source` into the same rows of `destination`.
void CopyRows(const Source& source, int64_t begin, int64_t end,
              const at::Tensor& destination) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  at::Tensor rows = destination.narrow(0, begin, end - begin);
  const auto* data = source.data + begin * source.row_bytes;
  const size_t element_bytes = at::elementSize(source.dtype);
  if (reinterpret_cast<uintptr_t>(data) % element_bytes == 0) {
    // from_blob takes a mutable pointer; copy_ only reads.
    rows.copy_(at::from_blob(const_cast<std::byte*>(data), rows.sizes(),
                             at::TensorOptions().dtype(source.dtype)));
    return;
  }
  // A header of odd length leaves the tensors where loads would be unaligned.
  const at::Tensor staging =
      at::empty(rows.sizes(), at::TensorOptions().dtype(source.dtype));
  std::memcpy(staging.data_ptr(), data, (end - begin) * source.row_bytes);
  rows.copy_(staging);
}

}  // namespace

absl::Status ReadTensor(const Checkpoint& checkpoint, std::string_view tensor,
                        at::Tensor destination) {
  WEFT_ASSIGN_OR_RETURN(const TensorView view, checkpoint.Find(tensor));
  const absl::string_view name(tensor.data(), tensor.size());
  const std::optional<at::ScalarType> dtype = FloatingType(view.dtype);
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", name, "' has dtype ", ScalarTypeName(view.dtype),
        "; F32, F16 or BF16 is expected"));
  }
  const auto sizes = destination.sizes();
  if (!std::ranges::equal(sizes, view.shape)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", name, "' has shape ", ShapeString(view.shape),
        "; expected ",
        ShapeString(absl::MakeConstSpan(sizes.data(), sizes.size()))));
  }
  if (view.bytes.empty()) return absl::OkStatus();
  if (destination.dim() == 0) destination = destination.unsqueeze(0);

  const int64_t num_rows = destination.size(0);
  const Source source = {
      .data = view.bytes.data(),
      .dtype = *dtype,
      .row_bytes = static_cast<int64_t>(view.bytes.size()) / num_rows};
  const int64_t block_rows =
      std::max<int64_t>(1, kBlockBytes / source.row_bytes);
  const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
  const auto copy_blocks = [&](int64_t first, int64_t last) {
    for (int64_t block = first; block < last; ++block) {
      CopyRows(source, block * block_rows,
               std::min((block + 1) * block_rows, num_rows), destination);
    }
  };
  if (destination.is_cpu()) {
    at::parallel_for(0, num_blocks, /*grain_size=*/1, copy_blocks);
  } else {
    // One stream: threads would only take turns.
    copy_blocks(0, num_blocks);
  }
  return absl::OkStatus();
}

}  // namespace weft::weights
