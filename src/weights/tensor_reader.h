// Reads tensors of a checkpoint directly into their destinations.
#ifndef WEFT_SRC_WEIGHTS_TENSOR_READER_H_
#define WEFT_SRC_WEIGHTS_TENSOR_READER_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/weights/checkpoint.h"

namespace weft::weights {

// The first row and the first column of a slice of a tensor.
struct SliceBegin {
  int64_t row = 0;
  int64_t column = 0;
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
  // Errors: those of Add; INVALID_ARGUMENT if the tensor has no such slice.
  [[nodiscard]] absl::Status AddSlice(std::string_view name,
                                      const SliceBegin& begin,
                                      const at::Tensor& destination);

  // Returns the number of bytes that Run reads from the files.
  [[nodiscard]] uint64_t num_bytes() const;

  // Reads everything. Calls `on_read` with the number of bytes of each block,
  // on any thread. Errors: INVALID_ARGUMENT for a tensor that is not row-major,
  // DATA_LOSS if a file was cut short. After an error the destinations are
  // undefined.
  [[nodiscard]] absl::Status Run(
      const std::function<void(int64_t)>& on_read) const;

 private:
  struct Item {
    DiskTensor source;
    at::ScalarType dtype;  // The file's dtype.
    SliceBegin begin;
    at::Tensor destination;  // [rows, columns].

    [[nodiscard]] int64_t element_bytes() const {
      return static_cast<int64_t>(c10::elementSize(dtype));
    }
  };

  absl::Status AddItem(std::string_view name, const DiskTensor& source,
                       const SliceBegin& begin, const at::Tensor& destination);

  const Checkpoint& checkpoint_;
  std::vector<Item> items_;
};

// Returns whether `tensor` (F32, F16 or BF16) already has the bits that
// ReadPlan::AddSlice would write. Reads the slice in blocks. Errors: those of
// ReadPlan.
[[nodiscard]] absl::StatusOr<bool> HasValues(const Checkpoint& checkpoint,
                                             std::string_view name,
                                             const SliceBegin& begin,
                                             const at::Tensor& tensor);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_READER_H_
