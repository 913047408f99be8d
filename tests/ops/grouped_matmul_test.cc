// Compares grouped products with products in f64. Also runs on the device of
// tests/support/host_device (tests/model).
#include "src/ops/grouped_matmul.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/support/tensors_near.h"

namespace weft::ops {
namespace {

struct Widths {
  int64_t inputs;
  int64_t outputs;
};

// Groups of 0, 3, 0, 1, 140 and 0 rows.
const std::vector<int64_t> kEnds = {0, 3, 3, 4, 144, 144};

// Sums of `terms` products are f32, and bf16 rounds them when they are stored.
void ExpectSumsNear(const at::Tensor& actual, const at::Tensor& expected,
                    int64_t terms) {
  const bool is_f32 = actual.scalar_type() == at::kFloat;
  ExpectNear(actual, expected, EpsilonOf(actual.scalar_type()),
             is_f32 ? terms : 1, "", /*least=*/0);
}

// Compares GroupedLinear and GroupedMatMul in the dtype of `options` with
// products in f64.
void ExpectProducts(const Widths& widths, const at::TensorOptions& options,
                    const std::vector<int64_t>& ends = kEnds) {
  at::manual_seed(5);
  const RowGroups groups(ends, options.device());
  const int64_t num_groups = groups.num_groups();
  const at::Tensor group_N = groups.GroupOfRows().cpu();
  const auto random = [&](at::IntArrayRef sizes) {
    return at::randn(sizes).to(options.dtype()).to(at::kDouble);
  };
  const at::Tensor x_NI = random({group_N.size(0), widths.inputs});
  const at::Tensor y_NO = random({group_N.size(0), widths.outputs});
  const at::Tensor weights_GI =
      random({num_groups * widths.outputs, widths.inputs});
  const at::Tensor bias_G = random({num_groups * widths.outputs});
  const at::Tensor weights_NOI =
      weights_GI.view({num_groups, widths.outputs, widths.inputs})
          .index_select(0, group_N);
  const at::Tensor expected_NO = at::einsum("ni,noi->no", {x_NI, weights_NOI});
  const at::Tensor x = x_NI.to(options), weights = weights_GI.to(options);
  ExpectSumsNear(GroupedLinear(x, weights, /*bias_G=*/{}, groups), expected_NO,
                 widths.inputs);
  ExpectSumsNear(
      GroupedLinear(x, weights, bias_G.to(options), groups),
      expected_NO +
          bias_G.view({num_groups, widths.outputs}).index_select(0, group_N),
      widths.inputs + 1);
  ExpectSumsNear(GroupedMatMul(y_NO.to(options), weights, groups),
                 at::einsum("no,noi->ni", {y_NO, weights_NOI}), widths.outputs);
}

TEST(GroupedMatMulTest, MultipliesEachGroupByItsWeight) {
  ExpectProducts({.inputs = 7, .outputs = 5}, at::kFloat);
}

// LibTorch's grouped product supports all of these widths except the last two.
TEST(GroupedMatMulTest, MultipliesEachGroupByItsWeightOnCuda) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const Widths& widths :
       std::vector<Widths>{{.inputs = 8, .outputs = 8},
                           {.inputs = 72, .outputs = 264},
                           {.inputs = 256, .outputs = 24},
                           {.inputs = 20, .outputs = 8},
                           {.inputs = 8, .outputs = 20}}) {
    ExpectProducts(widths, at::TensorOptions(at::kBFloat16).device(at::kCUDA));
  }
}

// LibTorch uses another kernel if the groups have more than 128 rows on average
// and there are more than 128 outputs.
TEST(GroupedMatMulTest, MultipliesLongGroupsOnCuda) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  for (const std::vector<int64_t>& ends : std::vector<std::vector<int64_t>>{
           {200, 200, 500}, {0, 0, 400}, {400, 400, 400}}) {
    ExpectProducts({.inputs = 136, .outputs = 264},
                   at::TensorOptions(at::kBFloat16).device(at::kCUDA), ends);
  }
}

TEST(GroupedMatMulTest, KnowsTheGroupOfEachRow) {
  EXPECT_TRUE(at::equal(RowGroups({2, 2, 3}, at::kCPU).GroupOfRows(),
                        at::tensor({0, 0, 2}, at::kLong)));
}

}  // namespace
}  // namespace weft::ops
