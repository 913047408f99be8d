// Reads tensors of a checkpoint directly into their destinations.
#ifndef WEFT_SRC_WEIGHTS_TENSOR_READER_H_
#define WEFT_SRC_WEIGHTS_TENSOR_READER_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/weights/checkpoint.h"
#include "src/weights/tensor_types.h"

namespace weft::weights {

// Returns LibTorch's name of F32, F16 or BF16; nothing for other types.
[[nodiscard]] std::optional<at::ScalarType> FloatingType(ScalarType type);

// Returns the memory of a contiguous tensor on the CPU.
[[nodiscard]] absl::Span<std::byte> BytesOf(const at::Tensor& tensor);

// The first row and the first column of a slice of a tensor.
struct SliceBegin {
  int64_t row = 0;
  int64_t column = 0;
};

// How rows are written to a destination that does not have them as numbers of a
// dtype. The default has no `store`: destinations have the file's shape.
struct RowFormat {
  int64_t columns = 0;  // The columns of the rows in the file.
  // Writes rows [n, columns], in the file's dtype on the CPU, to n rows of the
  // destination. Called on any thread.
  std::function<absl::Status(const at::Tensor& rows,
                             const at::Tensor& destination)>
      store = nullptr;
};

// A list of tensors to read. Add checks a tensor; Run reads all of them on all
// compute threads, in blocks of a few MB. Values are converted to the dtype of
// their destination and moved to its device. The CPU never holds a second copy
// of a whole tensor. It needs no buffer if dtype and device are the file's.
// Threads: not thread-safe. REQUIRES: destinations are distinct.
class ReadPlan {
 public:
  // `checkpoint` outlives the plan.
  explicit ReadPlan(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // Adds a whole tensor. Shapes: `destination` has the tensor's shape; it may
  // be a narrow view of a fused matrix. Errors: NOT_FOUND; INVALID_ARGUMENT
  // naming the tensor, its shape and the expected one, or a dtype other than
  // F32, F16, BF16.
  [[nodiscard]] absl::Status Add(std::string_view name,
                                 const at::Tensor& destination);

  // Adds only the slice of a matrix or vector that has the destination's shape.
  // A tensor with more dimensions counts as a matrix (DiskTensor::num_rows).
  // With a format, `destination` has the slice's rows in this format. Errors:
  // those of Add; INVALID_ARGUMENT if the tensor has no such slice.
  [[nodiscard]] absl::Status AddSlice(std::string_view name,
                                      const SliceBegin& begin,
                                      const at::Tensor& destination,
                                      const RowFormat& format = {});

  // Returns the number of bytes that Run reads from the files.
  [[nodiscard]] uint64_t num_bytes() const;

  // Reads everything. Calls `on_read` with the number of bytes of each block,
  // on any thread. Errors: INVALID_ARGUMENT for a tensor that is not row-major,
  // DATA_LOSS if a file was cut short, and those of RowFormat::store. After an
  // error the destinations are
  // undefined.
  [[nodiscard]] absl::Status Run(
      const std::function<void(int64_t)>& on_read) const;

 private:
  struct Item {
    DiskTensor source;
    at::ScalarType dtype;  // The file's dtype.
    SliceBegin begin;
    at::Tensor destination;  // [rows, columns], or rows in `format`.
    RowFormat format;        // `columns` is always set.

    [[nodiscard]] int64_t element_bytes() const {
      return static_cast<int64_t>(c10::elementSize(dtype));
    }
  };

  absl::Status AddItem(std::string_view name, const DiskTensor& source,
                       const SliceBegin& begin, const at::Tensor& destination,
                       const RowFormat& format);

  const Checkpoint& checkpoint_;
  std::vector<Item> items_;
};

// Returns whether `tensor` (F32, F16 or BF16) already has the bits that
// ReadPlan::AddSlice would write. Reads the slice in blocks. Errors: those of
// ReadPlan.
[[nodiscard]] absl::StatusOr<bool> HasValues(const Checkpoint& checkpoint,
                                             std::string_view name,
                                             const SliceBegin& begin,
                                             const at::Tensor& tensor,
                                             const RowFormat& format = {});

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_READER_H_
