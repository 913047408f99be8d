// Tensor bytes from a checkpoint straight into their place.
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

// Where a slice of a tensor begins: in its first dimension, and in its second.
struct SliceBegin {
  int64_t row = 0;
  int64_t column = 0;
};

// Reads of tensors, checked when they are added and done together by all
// compute threads, in blocks of a few MB. Values are converted to the dtype of
// their destination and moved to its device; there is no second copy of a
// tensor on the CPU, and no staging at all when dtype and device are the
// file's.
// Threads: one at a time; destinations are distinct.
class ReadPlan {
 public:
  // `checkpoint` outlives it.
  explicit ReadPlan(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  // Reads tensor `name` whole.
  // Shapes: destination has the tensor's shape; it may be a narrow view of a
  //         fused matrix.
  // Errors: NOT_FOUND; INVALID_ARGUMENT naming tensor, its shape and the
  //         expected one, or a dtype other than F32, F16, BF16.
  [[nodiscard]] absl::Status Add(std::string_view name,
                                 const at::Tensor& destination);

  // Reads the slice of a matrix or vector that has the destination's shape, and
  // no byte beside it. INVALID_ARGUMENT too when the tensor has no such slice.
  [[nodiscard]] absl::Status AddSlice(std::string_view name,
                                      const SliceBegin& begin,
                                      const at::Tensor& destination);

  // Bytes that Run reads of the files.
  [[nodiscard]] uint64_t num_bytes() const;

  // Does all reads. `on_read` hears of each block's bytes, from any thread.
  // Errors: INVALID_ARGUMENT for a tensor that is not row-major, DATA_LOSS when
  //         a file was cut short; destinations are undefined then.
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

// Whether ReadPlan::AddSlice would write the bits that `tensor` (F32, F16 or
// BF16) has already. Reads the slice in blocks.
// Errors: those of ReadPlan.
[[nodiscard]] absl::StatusOr<bool> HasValues(const Checkpoint& checkpoint,
                                             std::string_view name,
                                             const SliceBegin& begin,
                                             const at::Tensor& tensor);

}  // namespace weft::weights

#endif  // WEFT_SRC_WEIGHTS_TENSOR_READER_H_
