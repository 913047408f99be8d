#include "src/ops/panel_matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstdint>

#include "src/ops/cpu_dispatch.h"
#include "src/ops/panel_multiplier.h"

namespace weft::ops {
namespace {

// The number of columns of b that are copied and multiplied at a time. It is a
// multiple of the columns of every kernel's panel.
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
  const int64_t rows = a_MK.size(0), columns = b_KN.size(1);
  const at::Tensor b = HasAdjacentElements(b_KN) ? b_KN : b_KN.contiguous();
  at::Tensor y_MN = at::empty({rows, columns}, a_MK.options());
  if (bias_N.defined()) y_MN.copy_(bias_N.expand({rows, columns}));
  const int64_t num_slices = (columns + kSliceColumns - 1) / kSliceColumns;
  at::parallel_for(
      0, num_slices, RowGrain(kSliceColumns * b_KN.size(0)),
      [&](int64_t begin, int64_t end) {
        const c10::InferenceMode no_autograd;
        PanelMultiplier multiplier;
        for (int64_t slice = begin; slice < end; ++slice) {
          const int64_t first = slice * kSliceColumns;
          const int64_t count = std::min(kSliceColumns, columns - first);
          multiplier.Multiply(y_MN.narrow(1, first, count), a_MK,
                              b.narrow(1, first, count),
                              /*adds=*/bias_N.defined(), /*alpha=*/1);
        }
      });
  return y_MN;
}

}  // namespace weft::ops
