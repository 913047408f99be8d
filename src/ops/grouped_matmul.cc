#include "src/ops/grouped_matmul.h"

#include <ATen/ATen.h>

#include <utility>

#include "src/ops/cuda_dispatch.h"
#include "src/ops/host_copy.h"
#include "src/ops/matmul.h"

namespace weft::ops {
namespace {

// LibTorch's kernel moves 16 bytes at a time: 8 elements of bf16.
constexpr int64_t kVector = 8;
constexpr uintptr_t kAlignment = 16;
// LibTorch's grouped product first launches one block with a thread for each
// group. It refuses 1024 or more groups.
constexpr int64_t kMaxGroups = 1023;

bool IsAligned(const at::Tensor& matrix) {
  return matrix.scalar_type() == at::kBFloat16 && matrix.is_contiguous() &&
         matrix.size(1) % kVector == 0 &&
         reinterpret_cast<uintptr_t>(matrix.const_data_ptr()) % kAlignment == 0;
}

// Returns whether at::_grouped_mm can compute the product of `rows` with the
// weights or with the transposed weights.
bool TakesGroupedMm(const at::Tensor& rows, const at::Tensor& weights_GI,
                    const RowGroups& groups) {
  return rows.is_cuda() && IsAligned(rows) &&
         TakesGroupedProduct(weights_GI, groups.num_groups());
}

at::Tensor Stacked(const at::Tensor& weights_GI, const RowGroups& groups) {
  return weights_GI.view({groups.num_groups(), -1, weights_GI.size(1)});
}

// Returns product(rows, weight) of each group's rows and weight.
template <typename Product>
at::Tensor OneByOne(const at::Tensor& rows, const at::Tensor& weights_GI,
                    const RowGroups& groups, Product product) {
  TORCH_CHECK(!groups.ends.empty(), "products one by one want ",
              groups.num_groups(), " ends on the host, got none");
  const int64_t outputs = weights_GI.size(0) / groups.num_groups();
  at::Tensor results;
  int64_t begin = 0;
  for (int64_t group = 0; group < groups.num_groups(); ++group) {
    const int64_t count = groups.ends[group] - begin;
    if (count == 0) continue;
    const at::Tensor result =
        product(rows.narrow(0, begin, count),
                weights_GI.narrow(0, group * outputs, outputs));
    if (!results.defined()) {
      results = at::empty({rows.size(0), result.size(1)}, rows.options());
    }
    results.narrow(0, begin, count).copy_(result);
    begin += count;
  }
  return results;
}

}  // namespace

RowGroups::RowGroups(std::vector<int64_t> ends_of_groups, at::Device device)
    : ends(std::move(ends_of_groups)),
      ends_P(ToDevice(ends, device, at::kInt)),
      num_rows(ends.back()) {}

RowGroups::RowGroups(at::Tensor ends_on_device, int64_t total)
    : ends_P(std::move(ends_on_device)), num_rows(total) {}

at::Tensor RowGroups::GroupOfRows() const {
  return at::searchsorted(ends_P, at::arange(num_rows, ends_P.options()),
                          /*out_int32=*/false, /*right=*/true);
}

bool TakesGroupedProduct(const at::Tensor& weights_GI, int64_t num_groups) {
  if constexpr (kHasCudaKernels) {
    return weights_GI.is_cuda() && IsAligned(weights_GI) &&
           weights_GI.size(0) / num_groups % kVector == 0 &&
           num_groups <= kMaxGroups && cuda::HasGroupedProduct();
  }
  return false;
}

at::Tensor GroupedLinear(const at::Tensor& x_NI, const at::Tensor& weights_GI,
                         const at::Tensor& bias_G, const RowGroups& groups) {
  at::Tensor y_NO =
      TakesGroupedMm(x_NI, weights_GI, groups)
          ? at::_grouped_mm(x_NI, Stacked(weights_GI, groups).transpose(1, 2),
                            groups.ends_P)
          : OneByOne(x_NI, weights_GI, groups,
                     [](const at::Tensor& x, const at::Tensor& weight) {
                       return Linear(x, weight);
                     });
  if (bias_G.defined()) {
    y_NO.add_(bias_G.view({groups.num_groups(), -1})
                  .index_select(0, groups.GroupOfRows()));
  }
  return y_NO;
}

at::Tensor GroupedMatMul(const at::Tensor& y_NO, const at::Tensor& weights_GI,
                         const RowGroups& groups) {
  if (TakesGroupedMm(y_NO, weights_GI, groups)) {
    return at::_grouped_mm(y_NO, Stacked(weights_GI, groups), groups.ends_P);
  }
  return OneByOne(y_NO, weights_GI, groups,
                  [](const at::Tensor& y, const at::Tensor& weight) {
                    return MatMul(y, weight);
                  });
}

}  // namespace weft::ops
