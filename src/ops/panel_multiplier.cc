#include "src/ops/panel_multiplier.h"

#include <cstdint>

#include "kernels/cpu/kernels.h"

namespace weft::ops {

void PanelMultiplier::Multiply(const at::Tensor& out, const at::Tensor& a,
                               const at::Tensor& b, bool adds, double alpha) {
  namespace k = kernels::cpu;
  const int64_t terms = b.size(0), columns = b.size(1);
  const int64_t floats = k::PanelFloats(terms, columns);
  if (capacity_ < floats) {
    panels_ = std::make_unique_for_overwrite<float[]>(floats);
    capacity_ = floats;
  }
  k::Kernels().copy_panels({.from_KN = b.const_data_ptr<float>(),
                            .k_stride = b.stride(0),
                            .n_stride = b.stride(1),
                            .num_terms = terms,
                            .num_columns = columns,
                            .panels = panels_.get()});
  k::Kernels().panel_product({.left_MK = a.const_data_ptr<float>(),
                              .m_stride = a.stride(0),
                              .k_stride = a.stride(1),
                              .right_KN = panels_.get(),
                              .num_rows = a.size(0),
                              .num_terms = terms,
                              .num_columns = columns,
                              .scale = static_cast<float>(alpha),
                              .adds = adds,
                              .out_MN = out.mutable_data_ptr<float>(),
                              .out_stride = out.stride(0)});
}

}  // namespace weft::ops
