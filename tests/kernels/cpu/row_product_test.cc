// Compares the row products with the plain f64 loop of
// tests/kernels/cpu/reference.h, for every instruction set that this processor
// has.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "tests/kernels/cpu/kernel_test.h"
#include "tests/kernels/cpu/reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cpu::row_product_test {
namespace {

// The gap between the rows of every matrix reveals a wrong stride.
constexpr int64_t kGap = 5;
constexpr float kUntouched = -77;

// x [B, I], weight [O, I] and bias [O]. The weight's values are bf16 numbers,
// so that the kernels for f32 and for bf16 weights compute the same product.
struct Problem {
  int64_t rows, inputs, outputs;
  std::vector<float> x, weight, bias;

  Problem(int64_t num_rows, int64_t num_inputs, int64_t num_outputs)
      : rows(num_rows),
        inputs(num_inputs),
        outputs(num_outputs),
        x(RandomValues(rows * inputs, 1)),
        weight(RandomValues(outputs * inputs, 2)),
        bias(RandomValues(outputs, 3)) {
    for (float& w : weight) {
      w = std::bit_cast<float>(std::bit_cast<uint32_t>(w) & 0xffff0000U);
    }
  }

  std::vector<double> Expected(bool with_bias) const {
    return reference::RowProduct(
        x, weight, with_bias ? bias : std::vector<float>(), rows, outputs);
  }
};

template <typename T, typename U, typename Convert>
std::vector<T> WithGaps(const std::vector<U>& values, int64_t width,
                        Convert convert) {
  std::vector<T> result;
  for (size_t i = 0; i < values.size(); ++i) {
    result.push_back(convert(values[i]));
    const bool row_ends = (static_cast<int64_t>(i) + 1) % width == 0;
    if (row_ends) result.insert(result.end(), kGap, T{});
  }
  return result;
}

enum class Stored { kF32, kBf16 };

class RowProductTest
    : public ::testing::TestWithParam<std::tuple<Isa, Stored>> {
 protected:
  void SetUp() override {
    table_ = KernelsFor(std::get<0>(GetParam()));
    if (table_ == nullptr) {
      GTEST_SKIP() << "this processor lacks the instruction set";
    }
  }

  // Returns y [B, O + kGap] with the outputs [begin, end). The rest is
  // kUntouched.
  std::vector<float> Run(const Problem& problem, bool with_bias, int64_t begin,
                         int64_t end) const {
    const int64_t y_stride = problem.outputs + kGap;
    const auto same = [](float value) { return value; };
    const std::vector<float> x =
        WithGaps<float>(problem.x, problem.inputs, same);
    std::vector<float> y(problem.rows * y_stride, kUntouched);
    std::vector<float> memory(kRowProductFloats);
    const RowProduct item{
        .x_BI = x.data(),
        .x_stride = problem.inputs + kGap,
        .num_rows = problem.rows,
        .num_inputs = problem.inputs,
        .weight_stride = problem.inputs + kGap,
        .bias_O = with_bias ? problem.bias.data() : nullptr,
        .y_BO = y.data(),
        .y_stride = y_stride,
        .begin = begin,
        .end = end,
        .memory = problem.rows > kFewRows ? memory.data() : nullptr};
    if (std::get<1>(GetParam()) == Stored::kF32) {
      const auto weight = WithGaps<float>(problem.weight, problem.inputs, same);
      table_->row_product_f32(item, weight.data());
    } else {
      const auto weight =
          WithGaps<uint16_t>(problem.weight, problem.inputs, [](float value) {
            return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
          });
      table_->row_product_bf16(item, weight.data());
    }
    return y;
  }

  void ExpectMatchesReference(const Problem& problem, bool with_bias) const {
    const std::vector<float> y = Run(problem, with_bias, 0, problem.outputs);
    const std::vector<double> expected = problem.Expected(with_bias);
    const double tolerance = Tolerance(kEpsilonF32, problem.inputs, 10);
    for (int64_t b = 0; b < problem.rows; ++b) {
      for (int64_t o = 0; o < problem.outputs + kGap; ++o) {
        const float actual = y[b * (problem.outputs + kGap) + o];
        if (o >= problem.outputs) {
          ASSERT_EQ(actual, kUntouched);
        } else {
          ASSERT_NEAR(actual, expected[b * problem.outputs + o], tolerance)
              << "row " << b << " output " << o;
        }
      }
    }
  }

  const KernelTable* table_ = nullptr;
};

TEST_P(RowProductTest, MatchesTheReference) {
  for (const int64_t rows : {1, 2, 3, 5, 6, 7, 8, 13, 32, 33}) {
    for (const int64_t inputs : {1, 3, 4, 15, 16, 17, 33, 64, 257}) {
      for (const int64_t outputs : {1, 3, 4, 5, 11, 16}) {
        SCOPED_TRACE(::testing::Message()
                     << rows << " x " << inputs << " x " << outputs);
        const Problem problem(rows, inputs, outputs);
        ExpectMatchesReference(problem, /*with_bias=*/false);
        ExpectMatchesReference(problem, /*with_bias=*/true);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Longer sums and more rows than a kernel computes at a time.
TEST_P(RowProductTest, MatchesTheReferenceBeyondItsBlocks) {
  ExpectMatchesReference(Problem(7, kRowPart + 24, 9), /*with_bias=*/true);
  ExpectMatchesReference(Problem(kRowBlock + 2, 2 * kRowPart + 5, 21),
                         /*with_bias=*/true);
  ExpectMatchesReference(Problem(2 * kRowBlock + 37, kRowPart, 18),
                         /*with_bias=*/false);
}

// Everything that does not depend on the batch relies on this: an element is
// the same in every batch, and however threads share the rows and outputs.
TEST_P(RowProductTest, ARowIsTheSameToTheBitInEveryBatchAndRange) {
  std::mt19937 random(7);
  const auto number = [&random](int64_t most) {
    return std::uniform_int_distribution<int64_t>(1, most)(random);
  };
  for (int i = 0; i < 40; ++i) {
    const Problem all(number(300), number(i % 4 == 0 ? 2500 : 90), number(40));
    const bool with_bias = i % 2 == 0;
    const std::vector<float> whole = Run(all, with_bias, 0, all.outputs);
    const int64_t y_stride = all.outputs + kGap;
    for (int64_t begin = 0; begin < all.rows;) {
      const int64_t rows =
          std::min(i % 3 == 0 ? 1 : number(120), all.rows - begin);
      Problem part = all;
      part.rows = rows;
      part.x.assign(all.x.begin() + begin * all.inputs,
                    all.x.begin() + (begin + rows) * all.inputs);
      const int64_t split = number(all.outputs) - 1;
      std::vector<float> y = Run(part, with_bias, 0, split);
      const std::vector<float> rest = Run(part, with_bias, split, all.outputs);
      for (size_t e = 0; e < y.size(); ++e) {
        if (y[e] == kUntouched) y[e] = rest[e];
      }
      const auto expected = whole.begin() + begin * y_stride;
      ASSERT_EQ(y, std::vector<float>(expected, expected + rows * y_stride))
          << all.rows << " x " << all.inputs << " x " << all.outputs << ", "
          << rows << " rows from " << begin << ", split at " << split;
      begin += rows;
    }
  }
}

TEST_P(RowProductTest, NanStaysInItsRowAndOutput) {
  for (const int64_t rows : {1, 8, 40}) {
    Problem problem(rows, 21, 9);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    problem.x[20] = nan;
    problem.weight[5 * 21] = nan;
    const std::vector<float> y = Run(problem, /*with_bias=*/false, 0, 9);
    for (int64_t b = 0; b < rows; ++b) {
      for (int64_t o = 0; o < 9; ++o) {
        EXPECT_EQ(std::isnan(y[b * (9 + kGap) + o]), b == 0 || o == 5);
      }
    }
  }
}

std::string CaseName(
    const ::testing::TestParamInfo<RowProductTest::ParamType>& test) {
  const auto& [isa, stored] = test.param;
  return IsaName(isa) + (stored == Stored::kF32 ? "_F32" : "_Bf16");
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, RowProductTest,
                         ::testing::Combine(kEveryIsa,
                                            ::testing::Values(Stored::kF32,
                                                              Stored::kBf16)),
                         CaseName);

}  // namespace
}  // namespace weft::kernels::cpu::row_product_test
