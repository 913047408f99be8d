#include "src/executor/wire.h"

#include <ATen/ATen.h>

namespace weft::executor {

void Writer::Put(const at::Tensor& tensor) {
  Put(tensor.defined());
  if (!tensor.defined()) return;
  const at::Tensor values = tensor.contiguous();
  Put(values.scalar_type());
  Put(values.sizes().vec());
  bytes_.append(static_cast<const char*>(values.const_data_ptr()),
                values.nbytes());
}

void Reader::Get(at::Tensor& tensor) {
  bool defined = false;
  Get(defined);
  tensor = at::Tensor();
  if (!defined) return;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  Get(dtype);
  Get(sizes);
  tensor = at::empty(sizes, dtype);
  std::memcpy(tensor.mutable_data_ptr(), Take(tensor.nbytes()),
              tensor.nbytes());
}

}  // namespace weft::executor
