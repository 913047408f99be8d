// Checks an op's tensors before a kernel gets raw pointers to them.
#ifndef WEFT_SRC_OPS_CHECK_ARGUMENT_H_
#define WEFT_SRC_OPS_CHECK_ARGUMENT_H_

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace weft::ops {

// kAny: any strides. The op copies the tensor if its kernel needs contiguous
// memory.
enum class Layout { kContiguous, kAny };

// Throws c10::Error unless the argument is defined, has this dtype, these sizes
// and this layout, and is on the device of `like`. The message names the
// argument, its actual form and its expected form.
inline void CheckArgument(const char* name, const at::Tensor& argument,
                          const at::Tensor& like, at::ScalarType dtype,
                          at::IntArrayRef sizes,
                          Layout layout = Layout::kContiguous) {
  TORCH_CHECK(argument.defined(), name, " is undefined");
  TORCH_CHECK(
      argument.scalar_type() == dtype && argument.device() == like.device() &&
          argument.sizes() == sizes,
      name, " is ", argument.scalar_type(), " ", argument.sizes(), " on ",
      argument.device(), ", wanted ", dtype, " ", sizes, " on ", like.device());
  TORCH_CHECK(layout == Layout::kAny || argument.is_contiguous(), name,
              " is not contiguous: strides ", argument.strides(), " of sizes ",
              argument.sizes());
}

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_CHECK_ARGUMENT_H_
