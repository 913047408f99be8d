// Weights of 8 bits for tests.
#ifndef WEFT_TESTS_OPS_QUANTIZED_H_
#define WEFT_TESTS_OPS_QUANTIZED_H_

#include <ATen/ATen.h>

#include "src/ops/int8_weight.h"

namespace weft {

// Returns an uninitialised weight [O, I] of 8 bits on the CPU.
inline at::Tensor EmptyInt8(int64_t outputs, int64_t inputs) {
  return ops::Int8WeightIn(
      at::empty({outputs, ops::Int8RowStride(inputs)}, at::kChar), inputs);
}

// Returns rows [O, I] on the CPU in 8 bits.
inline at::Tensor QuantizedRows(const at::Tensor& rows_OI) {
  at::Tensor stored = EmptyInt8(rows_OI.size(0), rows_OI.size(1));
  TORCH_CHECK(!ops::QuantizeRows(rows_OI, stored).has_value());
  return stored;
}

// Copies a weight of 8 bits, as it lies in memory, to a device.
inline at::Tensor Int8To(const at::Tensor& weight, at::Device device) {
  return ops::Int8Memory(weight).to(device).narrow(1, 0, weight.size(1));
}

}  // namespace weft

#endif  // WEFT_TESTS_OPS_QUANTIZED_H_
