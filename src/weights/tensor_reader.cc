#include "src/weights/tensor_reader.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "src/base/status_macros.h"
#include "src/base/threads/mutex.h"
#include "src/weights/tensor_file.h"

namespace weft::weights {
namespace {

// The largest read of several rows, in bytes. A block of this size fills two
// huge pages, so threads rarely write to the same page. Conversions and
// transfers to a device use a buffer of this size.
constexpr int64_t kReadBytes = int64_t{4} << 20;

// Returns a view of the tensor as the matrix that DiskTensor::num_rows
// describes.
at::Tensor AsMatrix(const at::Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  if (tensor.dim() < 2) return tensor.view({-1, 1});
  return tensor.view({-1, tensor.size(-1)});
}

// Rows [begin, end) of a plan item's destination. `item` is the item's index.
struct RowBlock {
  size_t item = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

void AddBlocks(size_t item, int64_t num_rows, int64_t row_bytes,
               std::vector<RowBlock>& blocks) {
  const int64_t rows = std::max<int64_t>(1, kReadBytes / row_bytes);
  for (int64_t begin = 0; begin < num_rows; begin += rows) {
    blocks.push_back({item, begin, std::min(begin + rows, num_rows)});
  }
}

// Returns the part of the file's tensor that fills the rows of `block`. The
// slice of the tensor begins at `begin` and has `columns` columns.
DiskTensor::Block BlockOf(const SliceBegin& begin, const RowBlock& block,
                          int64_t columns, at::ScalarType dtype) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(dtype));
  return {.first_row = begin.row + block.begin,
          .num_rows = block.end - block.begin,
          .first_byte = static_cast<uint64_t>(begin.column * element_bytes),
          .num_bytes = static_cast<uint64_t>(columns * element_bytes)};
}

// Returns the integer type with the size of the tensor's elements. HasValues
// compares bits as integers, because a float NaN is not equal to itself.
at::ScalarType BitsType(const at::Tensor& tensor) {
  switch (tensor.element_size()) {
    case 1:
      return at::kChar;
    case 2:
      return at::kShort;
    default:
      return at::kInt;
  }
}

// Returns the shape of the file's slice that fills `destination`.
std::vector<int64_t> SliceShape(const at::Tensor& destination,
                                const RowFormat& format) {
  std::vector<int64_t> shape = destination.sizes().vec();
  if (format.store) shape.back() = format.columns;
  return shape;
}

// Converts `read` to the destination's format, and writes the result to `rows`.
// `read` has rows in the file's dtype.
absl::Status Store(const at::Tensor& read, const RowFormat& format,
                   const at::Tensor& rows) {
  if (format.store) return format.store(read, rows);
  rows.copy_(read);
  return absl::OkStatus();
}

}  // namespace

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

absl::Span<std::byte> BytesOf(const at::Tensor& tensor) {
  return absl::MakeSpan(static_cast<std::byte*>(tensor.mutable_data_ptr()),
                        tensor.nbytes());
}

absl::Status ForEachOnThreads(size_t count,
                              const std::function<absl::Status(size_t)>& work) {
  Mutex mu;
  absl::Status result;
  std::vector<std::atomic<bool>> taken(count);
  std::atomic<bool> failed = false;
  const int64_t num_threads = at::get_num_threads();
  const auto run = [&](int64_t thread, int64_t /*end*/) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const size_t first = count * thread / num_threads;
    for (size_t i = 0; i < count && !failed; ++i) {
      const size_t item = (first + i) % count;
      if (taken[item].exchange(true)) continue;
      const absl::Status status = work(item);
      if (status.ok()) continue;
      failed = true;
      const MutexLock lock(&mu);
      result.Update(status);
    }
  };
  at::parallel_for(0, num_threads, /*grain_size=*/1, run);
  return result;
}

absl::Status ReadPlan::Add(std::string_view name, const SliceBegin& begin,
                           const at::Tensor& destination,
                           const RowFormat& format) {
  WEFT_ASSIGN_OR_RETURN(const DiskTensor source, checkpoint_.Find(name));
  const std::vector<int64_t> sizes = SliceShape(destination, format);
  const auto dims = source.shape().size();
  bool fits = !sizes.empty() && sizes.size() == std::min<size_t>(dims, 2) &&
              begin.row >= 0 && begin.row <= source.num_rows() - sizes[0];
  if (fits && dims == 1) fits = begin.column == 0;
  if (fits && dims > 1) {
    fits =
        begin.column >= 0 && begin.column <= source.shape().back() - sizes[1];
  }
  const absl::string_view shown(name.data(), name.size());
  if (!fits) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", shown, "' has shape ", ShapeString(source.shape()),
        "; wanted is a slice from row ", begin.row, ", column ", begin.column,
        " of shape ", ShapeString(sizes)));
  }
  const std::optional<at::ScalarType> dtype = FloatingType(source.dtype());
  if (!dtype.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor '", shown, "' has dtype ", ScalarTypeName(source.dtype()),
        "; F32, F16 or BF16 is expected"));
  }
  if (destination.numel() == 0) return absl::OkStatus();
  Item item{source, *dtype, begin, AsMatrix(destination), format};
  if (!format.store) item.format.columns = item.destination.size(1);
  items_.push_back(std::move(item));
  return absl::OkStatus();
}

uint64_t ReadPlan::num_bytes() const {
  uint64_t bytes = 0;
  for (const Item& item : items_) {
    bytes += static_cast<uint64_t>(item.destination.size(0) *
                                   item.format.columns * item.element_bytes());
  }
  return bytes;
}

absl::Status ReadPlan::Run(const std::function<void(int64_t)>& on_read) const {
  std::vector<RowBlock> blocks;
  for (size_t i = 0; i < items_.size(); ++i) {
    const Item& item = items_[i];
    AddBlocks(i, item.destination.size(0),
              item.format.columns * item.element_bytes(), blocks);
  }
  return ForEachOnThreads(blocks.size(), [&](size_t index) -> absl::Status {
    const RowBlock& block = blocks[index];
    const Item& item = items_[block.item];
    at::Tensor rows =
        item.destination.narrow(0, block.begin, block.end - block.begin);
    const int64_t columns = item.format.columns;
    const bool direct = !item.format.store && rows.is_cpu() &&
                        rows.scalar_type() == item.dtype &&
                        rows.is_contiguous();
    const at::Tensor target =
        direct ? rows
               : at::empty({rows.size(0), columns},
                           at::TensorOptions().dtype(item.dtype));
    WEFT_RETURN_IF_ERROR(item.source.Read(
        BlockOf(item.begin, block, columns, item.dtype), BytesOf(target)));
    if (!direct) WEFT_RETURN_IF_ERROR(Store(target, item.format, rows));
    on_read(static_cast<int64_t>(target.nbytes()));
    return absl::OkStatus();
  });
}

absl::StatusOr<bool> HasValues(const Checkpoint& checkpoint,
                               std::string_view name, const SliceBegin& begin,
                               const at::Tensor& tensor,
                               const RowFormat& format) {
  ReadPlan plan(checkpoint);
  // The plan only checks that the slice can be read. The code below reads the
  // blocks.
  WEFT_RETURN_IF_ERROR(plan.Add(name, begin, tensor, format));
  WEFT_ASSIGN_OR_RETURN(const DiskTensor source, checkpoint.Find(name));
  if (tensor.numel() == 0) return true;
  const at::ScalarType dtype = *FloatingType(source.dtype());
  const at::Tensor held = AsMatrix(tensor);
  std::vector<RowBlock> blocks;
  const int64_t columns = format.store ? format.columns : held.size(1);
  AddBlocks(0, held.size(0),
            columns * static_cast<int64_t>(c10::elementSize(dtype)), blocks);
  std::atomic<bool> same = true;
  const auto compare = [&](size_t index) -> absl::Status {
    const RowBlock& block = blocks[index];
    if (!same) return absl::OkStatus();
    const at::Tensor rows =
        held.narrow(0, block.begin, block.end - block.begin).contiguous();
    const at::Tensor read =
        at::empty({rows.size(0), columns}, at::TensorOptions().dtype(dtype));
    WEFT_RETURN_IF_ERROR(
        source.Read(BlockOf(begin, block, columns, dtype), BytesOf(read)));
    const at::Tensor expected = at::empty_like(rows);
    WEFT_RETURN_IF_ERROR(Store(read, format, expected));
    const at::ScalarType bits = BitsType(rows);
    if (!at::equal(expected.view(bits), rows.view(bits))) {
      same = false;
    }
    return absl::OkStatus();
  };
  WEFT_RETURN_IF_ERROR(ForEachOnThreads(blocks.size(), compare));
  return same.load();
}

}  // namespace weft::weights
