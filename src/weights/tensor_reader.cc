#include "src/weights/tensor_reader.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/base/mutex.h"
#include "src/base/status_macros.h"
#include "src/weights/tensor_file.h"

namespace weft::weights {
namespace {

// One read: large enough to hide its overhead, small enough that the staging
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

// Reads blocks of rows of a tensor into the rows of a destination. One thread's
// staging is made when a block first needs it.
class BlockReader {
 public:
  BlockReader(const DiskTensor& source, at::ScalarType dtype, int64_t first_row,
              const at::Tensor& destination)
      : source_(source),
        dtype_(dtype),
        first_row_(first_row),
        destination_(destination) {}

  // Fills rows [begin, end) of the destination.
  absl::Status Read(int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    at::Tensor rows = destination_.narrow(0, begin, end - begin);
    if (rows.is_cpu() && rows.scalar_type() == dtype_ && rows.is_contiguous()) {
      return ReadInto(begin, end, rows);
    }
    if (!staging_.defined() || staging_.size(0) < end - begin) {
      staging_ = at::empty(rows.sizes(), at::TensorOptions().dtype(dtype_));
    }
    const at::Tensor staging = staging_.narrow(0, 0, end - begin);
    WEFT_RETURN_IF_ERROR(ReadInto(begin, end, staging));
    rows.copy_(staging);
    return absl::OkStatus();
  }

 private:
  absl::Status ReadInto(int64_t begin, int64_t end, const at::Tensor& rows) {
    return source_.ReadRows(
        first_row_ + begin, first_row_ + end,
        absl::MakeSpan(static_cast<std::byte*>(rows.mutable_data_ptr()),
                       rows.nbytes()));
  }

  const DiskTensor source_;
  const at::ScalarType dtype_;
  const int64_t first_row_;
  const at::Tensor destination_;
  at::Tensor staging_;
};

// Reads rows from `first_row` on: as many as the destination has, at least one.
absl::Status ReadBlocks(const DiskTensor& source, at::ScalarType dtype,
                        int64_t first_row, const at::Tensor& destination) {
  const int64_t num_rows = destination.size(0);
  const int64_t block_rows = std::max<int64_t>(
      1, kBlockBytes / static_cast<int64_t>(source.row_bytes()));
  const int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
  Mutex mu;
  absl::Status result;
  const auto read_blocks = [&](int64_t first, int64_t last) {
    BlockReader reader(source, dtype, first_row, destination);
    for (int64_t block = first; block < last; ++block) {
      const absl::Status read = reader.Read(
          block * block_rows, std::min((block + 1) * block_rows, num_rows));
      if (read.ok()) continue;
      const MutexLock lock(&mu);
      result.Update(read);
      return;
    }
  };
  if (destination.is_cpu()) {
    at::parallel_for(0, num_blocks, /*grain_size=*/1, read_blocks);
  } else {
    // One stream: threads would only take turns.
    read_blocks(0, num_blocks);
  }
  return result;
}

// Whether `sizes` are those of `shape`, the first of them aside if `rows`.
bool SizesAgree(at::IntArrayRef sizes, absl::Span<const int64_t> shape,
                bool rows) {
  if (!rows) return std::ranges::equal(sizes, shape);
  return !sizes.empty() && !shape.empty() &&
         std::ranges::equal(sizes.slice(1), shape.subspan(1));
}

absl::Status Read(const Checkpoint& checkpoint, std::string_view tensor,
                  std::optional<int64_t> first_row, at::Tensor destination) {
  WEFT_ASSIGN_OR_RETURN(const DiskTensor source, checkpoint.Find(tensor));
  const absl::string_view name(tensor.data(), tensor.size());
  const std::optional<at::ScalarType> dtype = FloatingType(source.dtype());
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", name, "' has dtype ", ScalarTypeName(source.dtype()),
        "; F32, F16 or BF16 is expected"));
  }
  const auto sizes = destination.sizes();
  if (!SizesAgree(sizes, source.shape(), first_row.has_value())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", name, "' has shape ", ShapeString(source.shape()),
        first_row.has_value() ? "; expected are rows of " : "; expected ",
        ShapeString(absl::MakeConstSpan(sizes.data(), sizes.size()))));
  }
  if (destination.numel() == 0) return absl::OkStatus();
  if (destination.dim() == 0) destination = destination.unsqueeze(0);
  const int64_t begin = first_row.value_or(0);
  if (begin < 0 || begin > source.num_rows() - destination.size(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", name, "' has ", source.num_rows(), " rows; wanted are [",
        begin, ", ", begin + destination.size(0), ")"));
  }
  return ReadBlocks(source, *dtype, begin, destination);
}

}  // namespace

absl::Status ReadTensor(const Checkpoint& checkpoint, std::string_view name,
                        at::Tensor destination) {
  return Read(checkpoint, name, std::nullopt, std::move(destination));
}

absl::Status ReadTensorRows(const Checkpoint& checkpoint, std::string_view name,
                            int64_t first_row, at::Tensor destination) {
  return Read(checkpoint, name, first_row, std::move(destination));
}

}  // namespace weft::weights
