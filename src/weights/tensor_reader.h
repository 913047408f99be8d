// Reads tensors of a checkpoint into their destinations.
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

// Returns LibTorch's type for F32, F16 or BF16, and none for other types.
std::optional<at::ScalarType> FloatingType(ScalarType type);

// Returns the memory of a contiguous tensor on the CPU.
absl::Span<std::byte> BytesOf(const at::Tensor& tensor);

// The first row and the first column of a slice of a tensor.
struct SliceBegin {
  int64_t row = 0;
  int64_t column = 0;
};

// How to write rows to a destination in another format, such as 8-bit numbers
// with scales. Without `store`, the destination has the shape of the file's
// rows, and values are converted to its dtype.
struct RowFormat {
  int64_t columns = 0;  // The columns of the rows in the file.
  // Writes `rows` [n, columns] to the n rows of `destination`. `rows` is on the
  // CPU and has the file's dtype. Any thread may call this function.
  std::function<absl::Status(const at::Tensor& rows,
                             const at::Tensor& destination)>
      store = nullptr;
};

// Runs work(i) for every i in [0, count) on all compute threads, until one call
// fails. Each thread starts in its own part of the range, so that reads are
// sequential and threads do not share pages. When its part is done, a thread
// takes calls from the other parts. Errors: those of `work`.
absl::Status ForEachOnThreads(size_t count,
                              const std::function<absl::Status(size_t)>& work);

// A list of slices of tensors to read. Add checks a slice. Run reads all of
// them on all compute threads, in blocks of a few MB. Values are converted to
// the destination's dtype and moved to its device. Run reads directly into a
// destination that is contiguous, on the CPU and of the file's dtype. Other
// destinations need a buffer of one block for each thread. Threads: not
// thread-safe. REQUIRES: destinations are distinct.
class ReadPlan {
 public:
  // `checkpoint` outlives the plan.
  explicit ReadPlan(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // Adds a slice of a matrix or vector. The slice begins at `begin` and has the
  // destination's shape. A tensor with more dimensions counts as a matrix
  // (DiskTensor::num_rows). With format.store, `destination` has the slice's
  // rows in that format. Errors: those of Checkpoint::Find; INVALID_ARGUMENT if
  // the tensor has no such slice, or a dtype other than F32, F16, BF16.
  // Messages name the tensor.
  absl::Status Add(std::string_view name, const SliceBegin& begin,
                   const at::Tensor& destination, const RowFormat& format = {});

  // Returns the number of bytes that Run reads from the files.
  uint64_t num_bytes() const;

  // Reads all tensors. Calls `on_read`, on any thread, with the size of each
  // block in bytes. Errors: those of DiskTensor::Read, such as DATA_LOSS if a
  // file has become shorter, and those of RowFormat::store. After an error the
  // destinations are undefined.
  absl::Status Run(const std::function<void(int64_t)>& on_read) const;

 private:
  struct Item {
    DiskTensor source;
    at::ScalarType dtype;  // The file's dtype.
    SliceBegin begin;
    at::Tensor destination;  // [rows, columns], or rows in `format`.
    RowFormat format;        // Without `format.store`, only `columns` is set.

    int64_t element_bytes() const {
      return static_cast<int64_t>(c10::elementSize(dtype));
    }
  };

  const Checkpoint& checkpoint_;
  std::vector<Item> items_;
};

// Returns whether `tensor` already has the bits that a ReadPlan with this slice
// would write. Reads the slice in blocks. Errors: those of ReadPlan.
absl::StatusOr<bool> HasValues(const Checkpoint& checkpoint,
                               std::string_view name, const SliceBegin& begin,
                               const at::Tensor& tensor,
                               const RowFormat& format = {});

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_READER_H_
