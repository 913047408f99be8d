// Weights of 8 bits for tests.
#ifndef WEFT_TESTS_OPS_QUANTIZED_H_
#define WEFT_TESTS_OPS_QUANTIZED_H_

#include <ATen/ATen.h>

#include "src/ops/int8_weight.h"

namespace weft {

// Returns rows [O, I] on the CPU in 8 bits.
inline at::Tensor QuantizedRows(const at::Tensor& rows_OI) {
  at::Tensor stored = at::empty(
      {rows_OI.size(0), ops::Int8RowBytes(rows_OI.size(1))}, at::kChar);
  TORCH_CHECK(!ops::QuantizeRows(rows_OI, stored).has_value());
  return stored;
}

}  // namespace weft

#endif  // WEFT_TESTS_OPS_QUANTIZED_H_
