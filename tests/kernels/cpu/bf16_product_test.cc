// Compares the bf16 products with plain f64 loops over operands that this file
// rounds to bf16. The bounds are those of f32 sums, so that a product with sums
// in bf16 fails.
#include "kernels/cpu/bf16_product.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/kernels/cpu/reference.h"
#include "tests/support/tolerance.h"

namespace weft::kernels::cpu::bf16_product_test {
namespace {

constexpr int64_t kGap = 6;  // Elements between the rows of every matrix.
constexpr float kUntouched = -77;
constexpr uint16_t kUntouchedBits = 0x4321;

uint32_t BitsOf(float x) { return std::bit_cast<uint32_t>(x); }

float Widened(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

// Rounds to nearest, ties to even.
uint16_t Rounded(float x) {
  const uint32_t bits = BitsOf(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

std::vector<uint16_t> RandomHalves(int64_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values) value = Rounded(normal(generator));
  return values;
}

enum class Stored { kOutputsByInputs, kInputsByOutputs };

// x [B, I] and weight [O, I].
struct Problem {
  int64_t rows, inputs, outputs;
  std::vector<uint16_t> x, weight;

  Problem(int64_t num_rows, int64_t num_inputs, int64_t num_outputs)
      : rows(num_rows),
        inputs(num_inputs),
        outputs(num_outputs),
        x(RandomHalves(rows * inputs, 1)),
        weight(RandomHalves(outputs * inputs, 2)) {}

  std::vector<double> Expected() const {
    std::vector<float> wide_x, wide_weight;
    for (const uint16_t value : x) wide_x.push_back(Widened(value));
    for (const uint16_t value : weight) wide_weight.push_back(Widened(value));
    return reference::RowProduct(wide_x, wide_weight, {}, rows, outputs);
  }
};

class Bf16ProductTest : public ::testing::TestWithParam<Stored> {
 protected:
  void SetUp() override {
    kernels_ = Bf16Kernels();
    if (kernels_ == nullptr) {
      GTEST_SKIP() << "this processor lacks AVX512_BF16";
    }
  }

  // Returns a source of the whole weight, in the layout of the test's
  // parameter.
  template <typename Element>
  static Bf16PanelSource<Element> SourceOf(const std::vector<Element>& weight,
                                           int64_t inputs, int64_t outputs) {
    const bool by_outputs = GetParam() == Stored::kOutputsByInputs;
    return {.weight = weight.data(),
            .input_stride = by_outputs ? 1 : outputs,
            .output_stride = by_outputs ? inputs : 1,
            .num_inputs = inputs,
            .num_outputs = outputs};
  }

  // The packed weight of inputs [begin, end), and the rows of x for them.
  struct Operands {
    std::unique_ptr<Bf16Panel> panel = std::make_unique<Bf16Panel>();
    std::vector<uint16_t> x;
    int64_t x_stride = 0;
  };
  Operands Pack(const Problem& p, int64_t begin, int64_t end) const {
    const bool by_outputs = GetParam() == Stored::kOutputsByInputs;
    const int64_t columns = (by_outputs ? p.inputs : p.outputs) + kGap;
    std::vector<uint16_t> weight(columns * (by_outputs ? p.outputs : p.inputs),
                                 kUntouchedBits);
    for (int64_t o = 0; o < p.outputs; ++o) {
      for (int64_t i = 0; i < p.inputs; ++i) {
        weight[by_outputs ? o * columns + i : i * columns + o] =
            p.weight[o * p.inputs + i];
      }
    }
    Operands operands;
    operands.x_stride = end - begin + (end - begin) % 2 + kGap;
    operands.x.resize(p.rows * operands.x_stride);
    for (int64_t b = 0; b < p.rows; ++b) {
      std::copy(p.x.begin() + b * p.inputs + begin,
                p.x.begin() + b * p.inputs + end,
                operands.x.begin() + b * operands.x_stride);
    }
    std::ranges::fill(operands.panel->elements, kUntouchedBits);
    kernels_->pack_panel(
        {.weight = weight.data() + begin * (by_outputs ? 1 : columns),
         .input_stride = by_outputs ? 1 : columns,
         .output_stride = by_outputs ? columns : 1,
         .num_inputs = end - begin,
         .num_outputs = p.outputs},
        operands.panel->elements);
    return operands;
  }

  // Computes the product over inputs [begin, end), where begin is even. Adds it
  // to y [B, O + kGap], or overwrites y.
  void Multiply(const Problem& p, int64_t begin, int64_t end, bool adds,
                std::vector<float>& y) const {
    const Operands operands = Pack(p, begin, end);
    kernels_->multiply_panel({.x = operands.x.data(),
                              .x_row_stride = operands.x_stride,
                              .num_rows = p.rows,
                              .panel = operands.panel->elements,
                              .num_inputs = end - begin,
                              .num_outputs = p.outputs,
                              .adds = adds,
                              .y_BO = y.data(),
                              .y_stride = p.outputs + kGap});
  }

  // Returns the product. The inputs from `split` on are the kernel's `last`
  // terms.
  std::vector<float> MultiplyWithLastTerms(const Problem& p,
                                           int64_t split) const {
    const Operands first = Pack(p, 0, split), last = Pack(p, split, p.inputs);
    std::vector<float> y(p.rows * (p.outputs + kGap), kUntouched);
    kernels_->multiply_panel({.x = first.x.data(),
                              .x_row_stride = first.x_stride,
                              .num_rows = p.rows,
                              .panel = first.panel->elements,
                              .num_inputs = split,
                              .num_outputs = p.outputs,
                              .last = {.x = last.x.data(),
                                       .x_row_stride = last.x_stride,
                                       .panel = last.panel->elements,
                                       .num_inputs = p.inputs - split},
                              .y_BO = y.data(),
                              .y_stride = p.outputs + kGap});
    return y;
  }

  std::vector<float> Multiply(const Problem& p) const {
    std::vector<float> y(p.rows * (p.outputs + kGap), kUntouched);
    Multiply(p, 0, p.inputs, /*adds=*/false, y);
    return y;
  }

  const Bf16KernelTable* kernels_ = nullptr;
};

TEST_P(Bf16ProductTest, MatchesTheReferenceAndTouchesNothingElse) {
  // A panel with few outputs takes up to 24 rows at a time, so 29 rows take two
  // steps.
  for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 29}) {
    for (const int64_t inputs : {1, 2, 3, 31, 32, 33, 64, 257}) {
      for (const int64_t outputs : {1, 15, 16, 17, 33, 63, 64}) {
        const Problem problem(rows, inputs, outputs);
        const std::vector<float> y = Multiply(problem);
        const std::vector<double> expected = problem.Expected();
        const double tolerance = Tolerance(kEpsilonF32, inputs, 10);
        for (int64_t i = 0; i < std::ssize(y); ++i) {
          const int64_t b = i / (outputs + kGap), o = i % (outputs + kGap);
          if (o >= outputs) {
            ASSERT_EQ(y[i], kUntouched);
          } else {
            ASSERT_NEAR(y[i], expected[b * outputs + o], tolerance)
                << rows << " x " << inputs << " x " << outputs << ", row " << b
                << ", output " << o;
          }
        }
      }
    }
  }
}

TEST_P(Bf16ProductTest, ARowHasTheSameBitsBesideOtherRows) {
  const Problem all(13, 67, 50);
  const std::vector<float> whole = Multiply(all);
  for (int64_t rows = 1; rows < all.rows; ++rows) {
    Problem first = all;
    first.rows = rows;
    const std::vector<float> y = Multiply(first);
    EXPECT_TRUE(std::equal(y.begin(), y.end(), whole.begin())) << rows;
  }
}

TEST_P(Bf16ProductTest, ASumOverTwoPanelsHasTheBitsOfOne) {
  const Problem problem(7, 101, 40);
  std::vector<float> y(problem.rows * (problem.outputs + kGap), kUntouched);
  Multiply(problem, 0, 62, /*adds=*/false, y);
  Multiply(problem, 62, 101, /*adds=*/true, y);
  EXPECT_EQ(y, Multiply(problem));
}

TEST_P(Bf16ProductTest, LastTermsHaveTheBitsOfOneLongSum) {
  for (const int64_t outputs : {9, 20, 40, 64}) {
    const Problem problem(31, 101, outputs);
    EXPECT_EQ(MultiplyWithLastTerms(problem, 62), Multiply(problem)) << outputs;
  }
}

TEST_P(Bf16ProductTest, ARoundedPanelIsThatOfRoundedNumbers) {
  for (const auto& [inputs, outputs] :
       {std::pair{1, 1}, {33, 17}, {40, 64}, {257, 50}}) {
    std::vector<float> numbers(inputs * outputs);
    std::mt19937 generator(3);
    std::normal_distribution<float> normal;
    for (float& number : numbers) number = normal(generator);
    std::vector<uint16_t> rounded;
    for (const float number : numbers) rounded.push_back(Rounded(3 * number));
    const auto panel = std::make_unique<Bf16Panel>();
    const auto expected = std::make_unique<Bf16Panel>();
    std::ranges::fill(panel->elements, kUntouchedBits);
    std::ranges::fill(expected->elements, kUntouchedBits);
    kernels_->round_panel(SourceOf(numbers, inputs, outputs), /*scale=*/3,
                          panel->elements);
    kernels_->pack_panel(SourceOf(rounded, inputs, outputs),
                         expected->elements);
    EXPECT_TRUE(std::ranges::equal(panel->elements, expected->elements));
  }
}

TEST_P(Bf16ProductTest, NanStaysInItsRowAndOutput) {
  Problem problem(8, 21, 9);
  const uint16_t nan = Rounded(std::numeric_limits<float>::quiet_NaN());
  problem.x[20] = nan;
  problem.weight[5 * 21] = nan;
  const std::vector<float> y = Multiply(problem);
  for (int64_t b = 0; b < 8; ++b) {
    for (int64_t o = 0; o < 9; ++o) {
      EXPECT_EQ(std::isnan(y[b * (9 + kGap) + o]), b == 0 || o == 5);
    }
  }
}

// A packed panel can also take the place of x. The gradients of keys and values
// compute x^T W in this way.
TEST_P(Bf16ProductTest, RowsMayBeAPackedPanel) {
  const Problem problem(50, 41, 37);
  std::vector<uint16_t> x_IB(problem.inputs * problem.rows);
  for (int64_t i = 0; i < std::ssize(x_IB); ++i) {
    const int64_t input = i / problem.rows, row = i % problem.rows;
    x_IB[i] = problem.x[row * problem.inputs + input];
  }
  const auto rows = std::make_unique<Bf16Panel>();
  const auto panel = std::make_unique<Bf16Panel>();
  kernels_->pack_panel({.weight = x_IB.data(),
                        .input_stride = problem.rows,
                        .output_stride = 1,
                        .num_inputs = problem.inputs,
                        .num_outputs = problem.rows},
                       rows->elements);
  kernels_->pack_panel({.weight = problem.weight.data(),
                        .input_stride = 1,
                        .output_stride = problem.inputs,
                        .num_inputs = problem.inputs,
                        .num_outputs = problem.outputs},
                       panel->elements);
  std::vector<float> y(problem.rows * problem.outputs);
  kernels_->multiply_panel({.x = rows->elements,
                            .x_row_stride = 2,
                            .x_pair_stride = 2 * kBf16PanelOutputs,
                            .num_rows = problem.rows,
                            .panel = panel->elements,
                            .num_inputs = problem.inputs,
                            .num_outputs = problem.outputs,
                            .y_BO = y.data(),
                            .y_stride = problem.outputs});
  const std::vector<double> expected = problem.Expected();
  for (size_t i = 0; i < y.size(); ++i) {
    ASSERT_NEAR(y[i], expected[i], Tolerance(kEpsilonF32, problem.inputs, 10));
  }
}

INSTANTIATE_TEST_SUITE_P(EveryLayout, Bf16ProductTest,
                         ::testing::Values(Stored::kOutputsByInputs,
                                           Stored::kInputsByOutputs),
                         [](const auto& test) {
                           return test.param == Stored::kOutputsByInputs
                                      ? "OutputsByInputs"
                                      : "InputsByOutputs";
                         });

TEST(RoundRowTest, RoundsToNearestAndTiesToEven) {
  const Bf16KernelTable* kernels = Bf16Kernels();
  if (kernels == nullptr) GTEST_SKIP() << "this processor lacks AVX512_BF16";
  std::vector<float> x = {1,
                          std::bit_cast<float>(0x3f808000U),  // Tie, to even.
                          std::bit_cast<float>(0x3f818000U),  // Tie, to even.
                          std::bit_cast<float>(0x3f808001U),  // Above a tie.
                          std::bit_cast<float>(0xbf807fffU),  // Below a tie.
                          std::numeric_limits<float>::max(),  // To infinity.
                          -std::numeric_limits<float>::infinity(),
                          -0.0F};
  std::mt19937 generator(3);
  std::normal_distribution<float> normal;
  while (x.size() < 100) x.push_back(normal(generator));
  for (const int64_t count : {1, 2, 15, 16, 17, 31, 32, 33, 64, 99, 100}) {
    std::vector<uint16_t> y(110, kUntouchedBits);
    kernels->round_row(x.data(), 1, count, y.data());
    for (int64_t i = 0; i < std::ssize(y); ++i) {
      uint16_t expected = kUntouchedBits;
      if (i < count) expected = Rounded(x[i]);
      if (i == count && count % 2 == 1) expected = 0;
      ASSERT_EQ(y[i], expected) << count << " numbers, number " << i;
    }
  }
  std::vector<uint16_t> scaled(x.size());
  kernels->round_row(x.data(), 0.3F, std::ssize(x), scaled.data());
  for (size_t i = 0; i < x.size(); ++i) {
    EXPECT_EQ(scaled[i], Rounded(0.3F * x[i]));
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  uint16_t y[2];
  kernels->round_row(&nan, 1, 1, y);
  EXPECT_TRUE(std::isnan(Widened(y[0])));
}

}  // namespace
}  // namespace weft::kernels::cpu::bf16_product_test
