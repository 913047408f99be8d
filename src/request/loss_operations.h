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

// What a call costs of the values that a graph may compute. The bytes of its
// result and of all that it makes meanwhile are counted as they are allocated.
enum class OperationCost : uint8_t {
  kPlain,  // Those of its tensors, or of the shape to which they are broadcast.
  kSlow,   // As kPlain, each at the price of 128: sorts, and what takes a
           // remainder.
  kView,   // Those of its tensor, and of the result, which shares its memory.
  kNew,    // Nothing: its arguments are numbers.
};

struct LossOperation {
  // As the function or the method is called in Python, without its module.
  absl::string_view name;
  OperationCost cost = OperationCost::kView;
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
