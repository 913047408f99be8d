// Compares products with 8-bit weights on CUDA with products of the dequantized
// numbers in f64.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>

#include "src/ops/int8_weight.h"
#include "src/ops/matmul.h"
#include "tests/ops/quantized.h"
#include "tests/support/tensors_near.h"

namespace weft::ops::cuda_int8_test {
namespace {

// The most rows that Int8FewRows takes.
constexpr int64_t kMostRows = 64;

at::Tensor OnDevice(const at::Tensor& x) {
  return IsInt8(x) ? Int8To(x, at::kCUDA) : x.to(at::kCUDA);
}

at::Tensor RandomRows(int64_t rows, int64_t columns) {
  return at::randn({rows, columns}).to(at::kBFloat16);
}

// Compares `actual` with a numbers + bias in f64. Shapes: a [M, K], numbers [K,
// N].
void ExpectProduct(const at::Tensor& actual, const at::Tensor& a,
                   const at::Tensor& numbers, const at::Tensor& bias) {
  at::Tensor expected = at::mm(a.to(at::kDouble), numbers);
  if (bias.defined()) expected += bias.to(at::kDouble);
  ASSERT_EQ(actual.sizes(), expected.sizes());
  ASSERT_EQ(actual.scalar_type(), at::kBFloat16);
  const double largest = MaxAbs(expected);
  EXPECT_LE(MaxDifference(actual, expected),
            StoredTolerance(kEpsilonBf16, a.size(1), largest, largest));
}

class CudaInt8Test : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no CUDA device";
  }
};

TEST_F(CudaInt8Test, AProductIsThatOfTheNumbers) {
  at::manual_seed(11);
  // No kernel takes 150 inputs, because they are not a multiple of 8.
  for (const int64_t inputs : {150, 360, 576, 4096}) {
    const at::Tensor stored = QuantizedRows(at::randn({50, inputs}));
    const at::Tensor weight = OnDevice(stored);
    const at::Tensor bias = at::randn({50}).to(at::kBFloat16);
    // Products of more than kMostRows rows, or without a kernel, read weights
    // rounded to bf16. The backward pass also reads the rounded weights.
    const at::Tensor rounded = Widened(stored, at::kBFloat16).to(at::kDouble);
    for (const int64_t rows : {int64_t{1}, kMostRows, kMostRows + 1}) {
      const at::Tensor x = RandomRows(rows, inputs), dy = RandomRows(rows, 50);
      const at::Tensor numbers = rows <= kMostRows && inputs % 8 == 0
                                     ? Widened(stored, at::kDouble)
                                     : rounded;
      ExpectProduct(Linear(OnDevice(x), weight, OnDevice(bias)), x, numbers.t(),
                    bias);
      ExpectProduct(Linear(OnDevice(x), weight.narrow(0, 3, 9)), x,
                    numbers.narrow(0, 3, 9).t(), {});
      ExpectProduct(MatMul(OnDevice(dy), weight), dy, rounded, {});
    }
  }
}

TEST_F(CudaInt8Test, ARowOfFewHasTheSameBitsInEveryBatch) {
  at::manual_seed(12);
  const at::Tensor x = OnDevice(RandomRows(kMostRows, 576));
  const at::Tensor weight = OnDevice(QuantizedRows(at::randn({30, 576})));
  const at::Tensor all = Linear(x, weight).cpu();
  for (const int64_t rows : {1, 9, 33}) {
    EXPECT_TRUE(at::equal(Linear(x.narrow(0, 0, rows), weight).cpu(),
                          all.narrow(0, 0, rows)));
  }
}

TEST_F(CudaInt8Test, WidensToTheBitsOfTheCpu) {
  at::manual_seed(13);
  const at::Tensor index = at::tensor({3, 19, 3}, at::kLong);
  for (const int64_t inputs : {150, 360, 512}) {
    const at::Tensor stored = QuantizedRows(at::randn({20, inputs}));
    const at::Tensor weight = OnDevice(stored);
    for (const at::ScalarType dtype :
         {at::kFloat, at::kBFloat16, at::kDouble}) {
      EXPECT_TRUE(
          at::equal(Widened(weight, dtype).cpu(), Widened(stored, dtype)));
      EXPECT_TRUE(at::equal(WidenedRows(weight, OnDevice(index), dtype).cpu(),
                            WidenedRows(stored, index, dtype)));
    }
  }
}

TEST_F(CudaInt8Test, RowsOfAnotherWidthAreRefused) {
  const at::Tensor weight = OnDevice(QuantizedRows(at::ones({16, 512})));
  const at::Tensor x = OnDevice(RandomRows(2, 511));
  EXPECT_THROW(static_cast<void>(Linear(x, weight)), c10::Error);
}

}  // namespace
}  // namespace weft::ops::cuda_int8_test
