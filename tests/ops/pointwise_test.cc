#include "src/ops/pointwise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "tests/support/tensors_near.h"

namespace weft::ops::pointwise_test {
namespace {

using Function = at::Tensor (*)(const at::Tensor&);

class PointwiseTest : public ::testing::TestWithParam<Function> {};

TEST_P(PointwiseTest, MatchesF64) {
  at::manual_seed(1);
  const at::Tensor x =
      at::cat({at::randn({997}) * 10, at::linspace(-120, 120, 61)});
  for (const at::Tensor& view : {x, x.view({2, 529}).t()}) {
    const at::Tensor y = GetParam()(view);
    EXPECT_TRUE(y.is_contiguous());
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    ExpectNear(y, GetParam()(view.to(at::kDouble)), kEpsilonF32, /*terms=*/16,
               "", /*least=*/1);
  }
}

TEST_P(PointwiseTest, AnElementIsTheSameToTheBitInEveryPlace) {
  at::manual_seed(2);
  const at::Tensor x = at::randn({70'001});
  const at::Tensor all = GetParam()(x);
  const int threads = at::get_num_threads();
  for (const int some : {1, 2, 3}) {
    at::set_num_threads(some);
    for (const int64_t begin : {0, 1, 7, 69'990}) {
      for (const int64_t count : {1, 3, 11}) {
        EXPECT_TRUE(at::equal(GetParam()(x.narrow(0, begin, count)),
                              all.narrow(0, begin, count)));
      }
    }
    EXPECT_TRUE(at::equal(GetParam()(x), all));
  }
  at::set_num_threads(threads);
}

INSTANTIATE_TEST_SUITE_P(Functions, PointwiseTest,
                         ::testing::Values(&Sigmoid, &Softplus),
                         [](const auto& test) {
                           return test.index == 0 ? "Sigmoid" : "Softplus";
                         });

}  // namespace
}  // namespace weft::ops::pointwise_test
