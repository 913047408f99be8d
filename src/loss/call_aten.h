// Calls functions of ATen with the arguments of a traced Python call.
#ifndef WEFT_SRC_LOSS_CALL_ATEN_H_
#define WEFT_SRC_LOSS_CALL_ATEN_H_

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "src/request/loss_operations.h"

namespace weft::loss {

// The arguments of a call. Tuples stand for lists, too, and strings for dtypes,
// devices, layouts and memory formats.
struct CallArguments {
  std::vector<c10::IValue> args;
  std::map<std::string, c10::IValue> kwargs;
};

// Calls the first overload of `operation` that takes the arguments, as Python's
// binding of PyTorch would: a number stands for a tensor, one integer for a
// list, and integers that end the arguments for a list. Before the call,
// `charge` gets how many values the call costs (OperationCost). Returns the
// result, as a tuple if there are several. Throws c10::Error if no overload
// takes the arguments, or the call fails; what `charge` throws.
// Threads: any. REQUIRES: the operation's kind is kAten or kConvert.
c10::IValue CallAten(const LossOperation& operation, CallArguments arguments,
                     const std::function<void(int64_t)>& charge);

// Returns the dtype with this name, which is one of those that ReadLossGraph
// accepts. Throws c10::Error for another.
at::ScalarType DtypeOf(const std::string& name);
std::string NameOfDtype(at::ScalarType dtype);

// True for an integer, a real and a bool.
bool IsNumber(const c10::IValue& value);

// Returns how many values a tensor of this shape costs: an empty dimension
// counts as one entry, because an operation may reduce it and make values of
// all the others. A huge number if the product would overflow.
int64_t CostOf(at::IntArrayRef sizes);
// Returns the values of the tensors, or those of the shape to which they are
// broadcast if these are more.
int64_t CostOf(const std::vector<at::Tensor>& tensors);

}  // namespace weft::loss

#endif  // WEFT_SRC_LOSS_CALL_ATEN_H_
