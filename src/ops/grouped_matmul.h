// Products of rows in groups. Each group has a weight of its own, such as the
// weight of an expert.
//
// Legend: N rows, P groups, I inputs and O outputs of one weight, G = P O.
#ifndef WEFT_SRC_OPS_GROUPED_MATMUL_H_
#define WEFT_SRC_OPS_GROUPED_MATMUL_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace weft::ops {

// Group p has the rows [ends[p - 1], ends[p]). A group may have no rows.
struct RowGroups {
  // `device` is the device of the rows. Queues an upload of the ends to
  // `device` and does not wait.
  RowGroups(std::vector<int64_t> ends_of_groups, at::Device device);
  // Groups of which only the device knows the ends, i32. The last end is
  // `total`.
  RowGroups(at::Tensor ends_on_device, int64_t total);

  int64_t num_groups() const { return ends_P.size(0); }
  // Returns the group of each row, [N] i64 on the device of the rows. Does not
  // wait.
  at::Tensor GroupOfRows() const;

  std::vector<int64_t> ends;  // Empty if only the device knows them.
  at::Tensor ends_P;  // The same numbers, i32 on the device of the rows.
  int64_t num_rows = 0;
};

// Returns whether LibTorch's grouped product multiplies rows in bf16 by these
// stacked weights of `num_groups` groups. Then it does not matter whether the
// host knows the ends.
bool TakesGroupedProduct(const at::Tensor& weights_GI, int64_t num_groups);

// In both functions, the weights of the groups are stacked: weights_GI is
// [P O, I], as in Linear, and may be in 8 bits. There is at least one row.
//
// LibTorch's grouped product computes all groups in two launches. It needs a
// device for which cuda::HasGroupedProduct() is true, rows and weights in bf16,
// and multiples of 8 for I and O. Otherwise the products of matmul.h compute
// one group after another, for which the host must know the ends.
//
// LibTorch's grouped product chooses between two kernels by the number of rows
// and of groups. Neither kernel splits a sum over blocks, but they may add up a
// row in different orders. So a row's bits may depend on the number of other
// rows.
// Errors:  throw c10::Error.
// Threads: the engine thread on CUDA, any on a CPU.

// Returns x W_p^T + bias_p for the rows of each group p, [N, O]. An undefined
// bias adds nothing.
// Shapes:  x_NI [N, I] contiguous, bias_G [P O].
at::Tensor GroupedLinear(const at::Tensor& x_NI, const at::Tensor& weights_GI,
                         const at::Tensor& bias_G, const RowGroups& groups);

// Returns y W_p for the rows of each group p, [N, I].
// Shapes:  y_NO [N, O] contiguous.
at::Tensor GroupedMatMul(const at::Tensor& y_NO, const at::Tensor& weights_GI,
                         const RowGroups& groups);

}  // namespace weft::ops

#endif  // WEFT_SRC_OPS_GROUPED_MATMUL_H_
