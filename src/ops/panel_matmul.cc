#include "src/ops/panel_matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "kernels/cpu/kernels.h"
#include "src/ops/cpu_dispatch.h"

namespace weft::ops {
namespace {

// The columns of b that are copied and used together. It is a multiple of every
// kernel's panel.
constexpr int64_t kSliceColumns = 96;

bool HasAdjacentElements(const at::Tensor& matrix) {
  return matrix.stride(0) == 1 || matrix.stride(1) == 1;
}

}  // namespace

bool TakesPanels(const at::Tensor& a_MK, const at::Tensor& b_KN) {
  return HasCpuKernel(a_MK) && HasCpuKernel(b_KN) && a_MK.numel() > 0 &&
         b_KN.numel() > 0;
}

at::Tensor PanelMatMul(const at::Tensor& a_MK, const at::Tensor& b_KN,
                       const at::Tensor& bias_N) {
  namespace k = kernels::cpu;
  const int64_t rows = a_MK.size(0), terms = b_KN.size(0);
  const int64_t columns = b_KN.size(1);
  const at::Tensor b = HasAdjacentElements(b_KN) ? b_KN : b_KN.contiguous();
  at::Tensor y_MN = at::empty({rows, columns}, a_MK.options());
  if (bias_N.defined()) y_MN.copy_(bias_N.expand({rows, columns}));
  const k::PanelCopy copy{.from_KN = b.const_data_ptr<float>(),
                          .k_stride = b.stride(0),
                          .n_stride = b.stride(1),
                          .num_terms = terms};
  const k::PanelProduct product{.left_MK = a_MK.const_data_ptr<float>(),
                                .m_stride = a_MK.stride(0),
                                .k_stride = a_MK.stride(1),
                                .num_rows = rows,
                                .num_terms = terms,
                                .adds = bias_N.defined(),
                                .out_MN = y_MN.mutable_data_ptr<float>(),
                                .out_stride = columns};
  const int64_t num_slices = (columns + kSliceColumns - 1) / kSliceColumns;
  at::parallel_for(
      0, num_slices, RowGrain(kSliceColumns * terms),
      [&](int64_t begin, int64_t end) {
        const auto panels = std::make_unique_for_overwrite<float[]>(
            k::PanelFloats(terms, kSliceColumns));
        for (int64_t slice = begin; slice < end; ++slice) {
          const int64_t first = slice * kSliceColumns;
          k::PanelCopy part = copy;
          part.from_KN += first * copy.n_stride;
          part.num_columns = std::min(kSliceColumns, columns - first);
          part.panels = panels.get();
          k::Kernels().copy_panels(part);
          k::PanelProduct of_part = product;
          of_part.right_KN = panels.get();
          of_part.num_columns = part.num_columns;
          of_part.out_MN += first;
          k::Kernels().panel_product(of_part);
        }
      });
  return y_MN;
}

}  // namespace weft::ops
