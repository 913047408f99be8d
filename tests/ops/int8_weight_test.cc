// Tests how weights are stored in 8 bits. Compares their f32 products with
// products of the dequantized numbers in f64.
#include "src/ops/int8_weight.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "src/ops/matmul.h"
#include "tests/ops/quantized.h"
#include "tests/support/tensors_near.h"

namespace weft::ops {
namespace {

void ExpectProduct(const at::Tensor& actual, const at::Tensor& a,
                   const at::Tensor& b, const at::Tensor& bias) {
  at::Tensor expected = at::mm(a.to(at::kDouble), b);
  if (bias.defined()) expected += bias.to(at::kDouble);
  EXPECT_EQ(actual.scalar_type(), at::kFloat);
  ExpectNear(actual, expected, kEpsilonF32, a.size(1), "", /*least=*/0);
}

class Int8ProductTest : public ::testing::TestWithParam<int64_t> {};

// Few rows take the kernel that reads 8 bits, many take the GEMM.
TEST_P(Int8ProductTest, IsThatOfTheWidenedWeightInF32) {
  const int64_t rows = GetParam();
  for (const int64_t inputs : {7, 64, 150}) {
    at::manual_seed(4);
    const at::Tensor a = at::randn({rows, inputs}), bias = at::randn({50});
    const at::Tensor weight = QuantizedRows(at::randn({50, inputs}));
    const at::Tensor wide = Widened(weight, at::kDouble);
    const at::Tensor y = MatMul(a, weight.t(), bias);
    ExpectProduct(y, a, wide.t(), bias);
    ExpectProduct(MatMul(a, weight.narrow(0, 3, 9).t()), a,
                  wide.narrow(0, 3, 9).t(), {});
    // This is the product of the backward pass.
    ExpectProduct(MatMul(y, weight), y, wide, {});
  }
}

INSTANTIATE_TEST_SUITE_P(FewAndManyRows, Int8ProductTest,
                         ::testing::Values(1, 7, 32, 33, 128, 129),
                         [](const auto& test) {
                           return absl::StrCat("Rows", test.param);
                         });

// The weight has more elements than are widened at a time.
TEST(Int8ProductTest, WidensALargeWeightInParts) {
  at::manual_seed(6);
  const at::Tensor a = at::randn({130, 4096});
  const at::Tensor bias = at::randn({5000});
  const at::Tensor weight = QuantizedRows(at::randn({5000, 4096}));
  const at::Tensor wide = Widened(weight, at::kDouble);
  const at::Tensor y = MatMul(a, weight.t(), bias);
  ExpectProduct(y, a, wide.t(), bias);
  ExpectProduct(MatMul(y, weight), y, wide, {});
}

TEST(Int8ProductTest, ARowOfFewHasTheSameBitsInEveryBatch) {
  at::manual_seed(5);
  const at::Tensor a = at::randn({128, 200});
  const at::Tensor weight = QuantizedRows(at::randn({30, 200}));
  const at::Tensor all = MatMul(a, weight.t());
  for (const int64_t rows : {1, 2, 31, 33, 100}) {
    EXPECT_TRUE(at::equal(MatMul(a.narrow(0, 0, rows), weight.t()),
                          all.narrow(0, 0, rows)));
  }
}

TEST(Int8WeightTest, IsTheSameFromEveryDtypeThatHoldsTheNumbers) {
  at::manual_seed(7);
  const at::Tensor half = at::randn({20, 100}).to(at::kHalf);
  const at::Tensor bf16 = half.to(at::kBFloat16);
  EXPECT_TRUE(
      at::equal(QuantizedRows(half), QuantizedRows(half.to(at::kFloat))));
  EXPECT_TRUE(
      at::equal(QuantizedRows(bf16), QuantizedRows(bf16.to(at::kFloat))));
  // Rows and columns of a larger matrix.
  const at::Tensor wide = at::randn({40, 300});
  const at::Tensor part = wide.narrow(0, 5, 20).narrow(1, 64, 100);
  EXPECT_TRUE(at::equal(QuantizedRows(part), QuantizedRows(part.contiguous())));
}

TEST(Int8WeightTest, IsWidenedExactlyAndRoundedOnceInBf16) {
  at::manual_seed(8);
  const at::Tensor weight = QuantizedRows(at::randn({20, 150}));
  const at::Tensor wide = Widened(weight, at::kFloat);
  EXPECT_TRUE(at::equal(Widened(weight, at::kDouble), wide.to(at::kDouble)));
  EXPECT_TRUE(
      at::equal(Widened(weight, at::kBFloat16), wide.to(at::kBFloat16)));
  const at::Tensor index = at::tensor({3, 19, 3}, at::kLong);
  EXPECT_TRUE(at::equal(WidenedRows(weight, index, at::kFloat),
                        wide.index_select(0, index)));
  // A weight that is not in 8 bits keeps its numbers.
  EXPECT_TRUE(at::equal(WidenedRows(wide, index, at::kDouble),
                        wide.index_select(0, index).to(at::kDouble)));
}

TEST(Int8WeightTest, NamesTheFirstRowThatIsNotFinite) {
  at::manual_seed(9);
  at::Tensor rows = at::randn({700, 130});
  rows[650][2] = INFINITY;
  rows[333][129] = NAN;
  EXPECT_EQ(QuantizeRows(rows, EmptyInt8(700, 130)), 333);
}

TEST(Int8WeightTest, OtherOperatorsRefuseIt) {
  const at::Tensor weight = QuantizedRows(at::ones({4, 64}));
  EXPECT_THROW(static_cast<void>(at::mm(at::ones({2, 64}), weight.t())),
               c10::Error);
  EXPECT_THROW(static_cast<void>(QuantizeRows(at::ones({4, 63}), weight)),
               c10::Error);
}

}  // namespace
}  // namespace weft::ops
