#include "src/ops/grouped_matmul.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/support/tolerance.h"

namespace weft::ops {
namespace {

constexpr int64_t kOutputs = 5;
constexpr int64_t kInputs = 7;

// Groups of 3, 0, 1 and 4 rows. tests/model/device_experts_test.cc has the
// products on CUDA.
TEST(GroupedMatMulTest, MultipliesEachGroupByItsWeight) {
  at::manual_seed(5);
  const std::vector<int64_t> group_of_row = {0, 0, 0, 2, 3, 3, 3, 3};
  const RowGroups groups({3, 3, 4, 8}, at::kCPU);
  const at::Tensor group_N = at::tensor(group_of_row);
  EXPECT_TRUE(at::equal(groups.GroupOfRows(), group_N));
  const at::Tensor x_NI = at::randn({8, kInputs});
  const at::Tensor weights_GI = at::randn({4 * kOutputs, kInputs});
  const at::Tensor bias_G = at::randn({4 * kOutputs});
  const at::Tensor weights_NOI =
      weights_GI.view({4, kOutputs, kInputs}).index_select(0, group_N);
  const at::Tensor bias_NO =
      bias_G.view({4, kOutputs}).index_select(0, group_N);
  const auto expect_near = [](const at::Tensor& actual, const at::Tensor& wide,
                              int64_t terms) {
    ASSERT_EQ(actual.sizes(), wide.sizes());
    EXPECT_LE((actual - wide).abs().max().item<double>(),
              testing::Tolerance(testing::kEpsilonF32, terms,
                                 wide.abs().max().item<double>()));
  };
  const at::Tensor y_NO = at::einsum(
      "ni,noi->no", {x_NI.to(at::kDouble), weights_NOI.to(at::kDouble)});
  expect_near(GroupedLinear(x_NI, weights_GI, /*bias_G=*/{}, groups), y_NO,
              kInputs);
  expect_near(GroupedLinear(x_NI, weights_GI, bias_G, groups), y_NO + bias_NO,
              kInputs + 1);
  const at::Tensor dy_NO = at::randn({8, kOutputs});
  expect_near(GroupedMatMul(dy_NO, weights_GI, groups),
              at::einsum("no,noi->ni",
                         {dy_NO.to(at::kDouble), weights_NOI.to(at::kDouble)}),
              kOutputs);
}

}  // namespace
}  // namespace weft::ops
