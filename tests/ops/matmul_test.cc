#include "src/ops/matmul.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "src/ops/int8_weight.h"
#include "tests/ops/quantized.h"
#include "tests/support/tensors_near.h"

namespace weft::ops::matmul_test {
namespace {

using Shape = std::tuple<int64_t, int64_t, int64_t>;
class MatMulTest
    : public ::testing::TestWithParam<std::tuple<Shape, at::ScalarType>> {
 protected:
  static void ExpectClose(const at::Tensor& actual, const at::Tensor& expected,
                          int64_t terms, at::ScalarType dtype) {
    EXPECT_EQ(actual.scalar_type(), dtype);
    ExpectNear(actual, expected, EpsilonOf(dtype), terms, "", /*least=*/0);
  }
};

TEST_P(MatMulTest, MatchesF64) {
  const auto [shape, dtype] = GetParam();
  const auto [m, k, n] = shape;
  at::manual_seed(3);
  const at::Tensor a = at::randn({m, k}, at::kDouble).to(dtype);
  const at::Tensor b = at::randn({k, n}, at::kDouble).to(dtype);
  const at::Tensor bias = at::randn({n}, at::kDouble).to(dtype);
  const at::Tensor expected = at::mm(a.to(at::kDouble), b.to(at::kDouble));
  ExpectClose(MatMul(a, b), expected, k, dtype);
  ExpectClose(MatMul(a, b, bias), expected + bias.to(at::kDouble), k, dtype);
  // b is a transposed view, like a weight [N, K].
  ExpectClose(MatMul(a, b.t().contiguous().t()), expected, k, dtype);
  // a consists of rows of a larger matrix.
  const at::Tensor rows = at::cat({a, a}).narrow(0, m, m);
  ExpectClose(MatMul(rows, b), expected, k, dtype);
  for (const at::Tensor& view : {b, b.t().contiguous().t()}) {
    ExpectClose(MatMul(rows, view, bias), expected + bias.to(at::kDouble), k,
                dtype);
  }
}

std::string ShapeName(
    const ::testing::TestParamInfo<MatMulTest::ParamType>& test) {
  const auto& [shape, dtype] = test.param;
  const auto& [m, k, n] = shape;
  return absl::StrCat("M", m, "_K", k, "_N", n, "_", c10::toString(dtype));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MatMulTest,
    ::testing::Combine(::testing::Values(Shape{1, 1, 1}, Shape{1, 37, 50},
                                         Shape{3, 64, 1}, Shape{32, 1300, 145},
                                         Shape{65, 48, 96}, Shape{0, 8, 8}),
                       ::testing::Values(at::kFloat, at::kDouble,
                                         at::kBFloat16)),
    ShapeName);

// Multiplies f32 activations by a bf16 weight, as models store it.
class MatMulOfBf16WeightTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(MatMulOfBf16WeightTest, IsThatOfItsWidenedValues) {
  const int64_t rows = GetParam();
  at::manual_seed(4);
  const at::Tensor a = at::randn({rows, 37}), bias = at::randn({50});
  const at::Tensor weight_NK = at::randn({50, 37}).to(at::kBFloat16);
  const at::Tensor expected = at::addmm(bias.to(at::kDouble), a.to(at::kDouble),
                                        weight_NK.to(at::kDouble).t());
  const at::Tensor y = MatMul(a, weight_NK.t(), bias);
  EXPECT_EQ(y.scalar_type(), at::kFloat);
  ExpectNear(y, expected, kEpsilonF32, 37, "", /*least=*/0);
  // This is the product of the backward pass.
  const at::Tensor back = MatMul(y, weight_NK);
  const at::Tensor expected_back =
      at::mm(y.to(at::kDouble), weight_NK.to(at::kDouble));
  EXPECT_EQ(back.scalar_type(), at::kFloat);
  ExpectNear(back, expected_back, kEpsilonF32, 50, "", /*least=*/0);
}

INSTANTIATE_TEST_SUITE_P(FewAndManyRows, MatMulOfBf16WeightTest,
                         ::testing::Values(1, 7, 32, 33, 100, 128, 129, 200),
                         [](const auto& test) {
                           return absl::StrCat("Rows", test.param);
                         });

// The weight has more inputs than a kernel reads at a time.
TEST(MatMulOfLargeBf16WeightTest, MatchesTheWidenedOne) {
  at::manual_seed(6);
  const at::Tensor a = at::randn({130, 4096}), bias = at::randn({5000});
  const at::Tensor weight_NK = at::randn({5000, 4096}).to(at::kBFloat16);
  const at::Tensor expected =
      at::addmm(bias, a, weight_NK.to(at::kFloat).t()).to(at::kDouble);
  const at::Tensor y = MatMul(a, weight_NK.t(), bias);
  ExpectNear(y, expected, kEpsilonF32, 4096, "", /*least=*/0);
}

// Allows bf16 products for one test.
class Bf16ArithmeticTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!AllowBf16Products(true)) {
      GTEST_SKIP() << "this processor lacks AVX512_BF16";
    }
  }
  void TearDown() override { AllowBf16Products(false); }

  static at::Tensor Rounded(const at::Tensor& x) {
    return x.to(at::kBFloat16).to(at::kDouble);
  }

  // The bound is that of f32 sums over rounded operands.
  static void ExpectProductOfRounded(const at::Tensor& y, const at::Tensor& a,
                                     const at::Tensor& b) {
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    const at::Tensor expected = at::mm(Rounded(a), Rounded(b));
    ExpectNear(y, expected, kEpsilonF32, a.size(1), "", /*least=*/0);
  }
};

TEST_F(Bf16ArithmeticTest, OperandsAreRoundedAndSumsAreF32) {
  at::manual_seed(7);
  // The longest sum takes several panels of the weight.
  for (const auto& [m, k, n] : {Shape{33, 37, 50}, Shape{200, 64, 64},
                                Shape{70, 4099, 130}, Shape{49, 1, 65}}) {
    const at::Tensor a = at::randn({m, k}), bias = at::randn({n});
    const at::Tensor weight_NK = at::randn({n, k}).to(at::kBFloat16);
    const at::Tensor y = MatMul(a, weight_NK.t());
    ExpectProductOfRounded(y, a, weight_NK.t());
    EXPECT_TRUE(at::equal(MatMul(a, weight_NK.t(), bias), y + bias));
    // This is the product of the backward pass.
    ExpectProductOfRounded(MatMul(y, weight_NK), y, weight_NK);
    // The operands and the result are parts of larger matrices.
    const at::Tensor wide = at::cat({a, a}, 1).narrow(1, k, k);
    at::Tensor into = at::full({m, n + 3}, -77.0F);
    MatMulInto(wide, weight_NK.t(), into.narrow(1, 2, n));
    EXPECT_TRUE(at::equal(into.narrow(1, 2, n), y));
    EXPECT_TRUE((into.narrow(1, 0, 2) == -77).all().item<bool>());
    EXPECT_TRUE((into.narrow(1, n + 2, 1) == -77).all().item<bool>());
  }
}

TEST_F(Bf16ArithmeticTest, ARowIsTheSameToTheBitInEveryBatchAndOnEveryThread) {
  at::manual_seed(8);
  const at::Tensor a = at::randn({150, 70});
  const at::Tensor weight = at::randn({130, 70}).to(at::kBFloat16);
  const at::Tensor all = MatMul(a, weight.t());
  const int before = at::get_num_threads();
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    for (const int64_t rows : {1, 2, 7, 31, 33, 47, 48, 100}) {
      EXPECT_TRUE(at::equal(MatMul(a.narrow(0, 20, rows), weight.t()),
                            all.narrow(0, 20, rows)));
    }
    // The backward pass computes any number of rows in the same way.
    const at::Tensor back = MatMul(all, weight);
    EXPECT_TRUE(
        at::equal(MatMul(all.narrow(0, 7, 1), weight), back.narrow(0, 7, 1)));
  }
  at::set_num_threads(before);
}

TEST_F(Bf16ArithmeticTest, NothingElseIsRounded) {
  const at::Tensor a = at::randn({40, 30}), b = at::randn({30, 20});
  const at::Tensor in_f32 = MatMul(a, b);
  AllowBf16Products(false);
  EXPECT_TRUE(at::equal(MatMul(a, b), in_f32));
}

TEST(LinearTest, HasTheBitsOfTheProductWithTheTransposedWeight) {
  at::manual_seed(9);
  for (const at::ScalarType dtype :
       {at::kFloat, at::kBFloat16, at::kChar, at::kDouble}) {
    for (const int64_t inputs : {1, 70}) {
      const at::Tensor wide_OI = at::randn({45, inputs});
      const at::Tensor weight_OI =
          dtype == at::kChar ? QuantizedRows(wide_OI) : wide_OI.to(dtype);
      const at::ScalarType row_type =
          dtype == at::kDouble ? at::kDouble : at::kFloat;
      const at::Tensor bias_O = at::randn({45}, row_type);
      for (const int64_t rows : {0, 1, 7, 32, 33, 140}) {
        const at::Tensor x = at::randn({rows, inputs}, row_type);
        EXPECT_TRUE(at::equal(Linear(x, weight_OI), MatMul(x, weight_OI.t())));
        EXPECT_TRUE(at::equal(Linear(x, weight_OI, bias_O),
                              MatMul(x, weight_OI.t(), bias_O)))
            << dtype << ", " << rows << " x " << inputs;
      }
    }
  }
}

enum class Stored { kF32, kBf16, kInt8 };

at::Tensor Weight(int64_t outputs, int64_t inputs, Stored stored) {
  const at::Tensor wide_OI = at::randn({outputs, inputs});
  if (stored == Stored::kF32) return wide_OI;
  if (stored == Stored::kBf16) return wide_OI.to(at::kBFloat16);
  return QuantizedRows(wide_OI);
}

class MatMulBatchTest : public ::testing::TestWithParam<Stored> {
 protected:
  void TearDown() override { at::set_num_threads(num_threads_); }

  // Expects that rows of a have the bits of `all`, the product of all rows, in
  // random batches and on any number of threads.
  void ExpectSameInEveryBatch(const at::Tensor& a, const at::Tensor& b,
                              const at::Tensor& bias, const at::Tensor& all) {
    for (int64_t begin = 0; begin < a.size(0);) {
      at::set_num_threads(static_cast<int>(Number(4)));
      const int64_t rows =
          std::min(Number(3) == 1 ? 1 : Number(a.size(0)), a.size(0) - begin);
      ASSERT_TRUE(at::equal(MatMul(a.narrow(0, begin, rows), b, bias),
                            all.narrow(0, begin, rows)))
          << rows << " rows from " << begin << " of " << a.sizes() << " with "
          << b.sizes();
      begin += rows;
    }
  }

  int64_t Number(int64_t most) {
    return std::uniform_int_distribution<int64_t>(1, most)(random_);
  }

 private:
  const int num_threads_ = at::get_num_threads();
  std::mt19937 random_{11};
};

// The promise to users: on a CPU, a row's result depends on the row, the
// weights and nothing else.
TEST_P(MatMulBatchTest, ARowIsTheSameToTheBitInEveryBatchAndOnEveryThread) {
  at::manual_seed(8);
  for (int i = 0; i < 60; ++i) {
    const int64_t rows = Number(300), inputs = Number(i % 5 == 0 ? 2500 : 200),
                  outputs = Number(i % 7 == 0 ? 3000 : 300);
    const at::Tensor weight = Weight(outputs, inputs, GetParam());
    const bool forward = i % 2 == 0;
    const int64_t terms = forward ? inputs : outputs;
    const int64_t results = forward ? outputs : inputs;
    // Rows of a larger matrix, or rows on their own.
    const at::Tensor a = i % 3 == 0
                             ? at::randn({rows, terms + 3}).narrow(1, 2, terms)
                             : at::randn({rows, terms});
    const at::Tensor bias = i % 4 < 2 ? at::randn({results}) : at::Tensor();
    const at::Tensor b = forward ? weight.t() : weight;
    ExpectSameInEveryBatch(a, b, bias, MatMul(a, b, bias));
    if (HasFatalFailure()) return;
  }
}

// 8-bit and bf16 weights have the bits of the same weights in f32.
TEST_P(MatMulBatchTest, HasTheBitsOfTheWidenedWeight) {
  at::manual_seed(9);
  for (const int64_t rows : {1, 3, 20, 40, 150}) {
    const at::Tensor weight = Weight(210, 130, GetParam());
    const at::Tensor wide = Widened(weight, at::kFloat);
    const at::Tensor x = at::randn({rows, 130}), dy = at::randn({rows, 210});
    EXPECT_TRUE(at::equal(MatMul(x, weight.t()), MatMul(x, wide.t())));
    EXPECT_TRUE(at::equal(MatMul(dy, weight), MatMul(dy, wide)));
  }
}

std::string StoredName(const ::testing::TestParamInfo<Stored>& test) {
  switch (test.param) {
    case Stored::kF32:
      return "F32";
    case Stored::kBf16:
      return "Bf16";
    default:
      return "Int8";
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, MatMulBatchTest,
                         ::testing::Values(Stored::kF32, Stored::kBf16,
                                           Stored::kInt8),
                         StoredName);

TEST(AddMatMulTest, ARowIsTheSameToTheBitInEveryBatch) {
  at::manual_seed(12);
  const at::Tensor a = at::randn({60, 16}), b = at::randn({16, 40});
  const at::Tensor before = at::randn({60, 40});
  const double scale = 1.3;  // Not a power of two, so it rounds.
  at::Tensor all = before.clone();
  AddMatMul(all, a, b, scale);
  for (const int64_t rows : {1, 39, 40, 41}) {
    at::Tensor part = before.narrow(0, 0, rows).clone();
    AddMatMul(part, a.narrow(0, 0, rows), b, scale);
    EXPECT_TRUE(at::equal(part, all.narrow(0, 0, rows)));
  }
}

TEST(MatMulSizesTest, RefusesOperandsThatDoNotFit) {
  for (const int64_t rows : {1, 20, 60}) {
    const at::Tensor a = at::randn({rows, 30}), bias = at::randn({9});
    for (const Stored stored : {Stored::kF32, Stored::kBf16, Stored::kInt8}) {
      const at::Tensor weight = Weight(/*outputs=*/20, /*inputs=*/31, stored);
      EXPECT_THROW(MatMul(a, weight.t()), c10::Error);
      EXPECT_THROW(Linear(a, weight), c10::Error);
      EXPECT_THROW(MatMul(a, weight), c10::Error);
      const at::Tensor fits = Weight(/*outputs=*/20, /*inputs=*/30, stored);
      EXPECT_THROW(Linear(a, fits, bias), c10::Error);
    }
    EXPECT_THROW(AddMatMul(at::zeros({rows, 5}), a, at::randn({31, 5}), 1),
                 c10::Error);
    EXPECT_THROW(AddMatMul(at::zeros({rows, 6}), a, at::randn({30, 5}), 1),
                 c10::Error);
  }
}

TEST(MatMulRepeatTest, GivesTheSameBitsAgain) {
  const at::Tensor a = at::randn({70, 40}), b = at::randn({40, 30});
  EXPECT_TRUE(at::equal(MatMul(a, b), MatMul(a, b)));
}

// Without OpenMP in Weft's objects, at::parallel_for would silently be a plain
// loop.
TEST(ParallelForTest, RunsOnEveryThread) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  std::array<int, 2> threads{-1, -1};
  at::parallel_for(0, 2, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) threads[i] = at::get_thread_num();
  });
  at::set_num_threads(before);
  EXPECT_EQ(threads, (std::array<int, 2>{0, 1}));
}

}  // namespace
}  // namespace weft::ops::matmul_test
