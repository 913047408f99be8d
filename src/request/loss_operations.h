// The closed list of operations that the graph of a custom loss may use. They
// have no state and no randomness, and change no argument, so that a step that
// is replayed gives the same bits. Torch-free: the table names functions of
// ATen, which src/loss/run_loss_graph.cc calls.
// Threads: any.
#ifndef WEFT_SRC_REQUEST_LOSS_OPERATIONS_H_
#define WEFT_SRC_REQUEST_LOSS_OPERATIONS_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace weft {

// The most dimensions of a tensor, and the most integers in a list of them.
inline constexpr int64_t kMaxGraphDims = 4;

// What an operation does. All except kAten are written by hand.
enum class OperationKind : uint8_t {
  kAten,     // One of the functions of ATen that `overloads` names.
  kCast,     // Tensor.float and its like.
  kConvert,  // Tensor.to.
  kSize,
  kDim,
  kNumel,
  kGetItem,
  kGetAttr,
};

// How many values a call of kAten computes at most, there or in the backward
// pass.
enum class ResultSize : uint8_t {
  kView,  // As the argument whose memory the result shares, and the result.
  kBroadcast,  // As the shapes of the tensors, broadcast together.
  kLargest,    // As the largest tensor.
  kSorted,     // As the largest tensor, each value at the price of 16.
  kSum,        // As all tensors together.
  kGiven,      // The product of a list of sizes.
  kRange,      // The length of a range.
};

struct LossOperation {
  // As the function or the method is called in Python, without its module.
  absl::string_view name;
  ResultSize size = ResultSize::kView;
  // For kAten: names with overloads, such as "max max.dim", which are tried in
  // this order. For kCast: the dtype.
  absl::string_view overloads;
  OperationKind kind = OperationKind::kAten;
};

// An operation as a node names it.
struct FoundOperation {
  const LossOperation* operation = nullptr;  // nullptr: it is not offered.
  // A function of Python's module math: takes and returns numbers.
  bool of_math = false;
};

absl::Span<const LossOperation> LossOperations();

// Finds the operation of a node call_function (`is_method` is false), whose
// target is such as "torch.exp", "operator.mul" or "math.sqrt", or of a node
// call_method, whose target is such as "sum".
FoundOperation FindLossOperation(bool is_method, absl::string_view target);

}  // namespace weft

#endif  // WEFT_SRC_REQUEST_LOSS_OPERATIONS_H_
