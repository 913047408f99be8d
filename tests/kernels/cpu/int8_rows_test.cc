// Checks rows in 8 bits (kernels/cpu/int8_rows.h) and their products, with
// every instruction set that this processor runs.
#include "kernels/cpu/int8_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "kernels/cpu/kernels.h"
#include "tests/kernels/cpu/kernel_test.h"

namespace weft::kernels::cpu::int8_rows_test {
namespace {

constexpr int64_t kLengths[] = {1, 3, 16, 63, 64, 65, 100, 128, 200, 576};

double ScaleOf(const std::vector<int8_t>& row, int64_t inputs, int64_t i) {
  const int64_t at = inputs + i / kInt8Group * kInt8ScaleBytes;
  const uint32_t bits = static_cast<uint8_t>(row[at]) |
                        static_cast<uint32_t>(static_cast<uint8_t>(row[at + 1]))
                            << 8;
  return std::bit_cast<float>(bits << 16);
}

class Int8RowsTest : public KernelTest {
 protected:
  std::vector<int8_t> Quantized(const std::vector<float>& x) const {
    const auto inputs = static_cast<int64_t>(x.size());
    std::vector<int8_t> row(Int8RowBytes(inputs));
    EXPECT_TRUE(table_->quantize_row(x.data(), inputs, row.data()));
    return row;
  }

  std::vector<float> Widened(const std::vector<int8_t>& row,
                             int64_t inputs) const {
    std::vector<float> wide(inputs);
    table_->widen_int8_row(row.data(), inputs, 0, inputs, wide.data());
    return wide;
  }

  // Checks the bounds that int8_rows.h states.
  void ExpectWithinHalfAStep(const std::vector<float>& x) const {
    const auto inputs = static_cast<int64_t>(x.size());
    const std::vector<int8_t> row = Quantized(x);
    const std::vector<float> wide = Widened(row, inputs);
    for (int64_t i = 0; i < inputs; ++i) {
      const int64_t begin = i / kInt8Group * kInt8Group;
      const int64_t end = std::min(begin + kInt8Group, inputs);
      double largest = 0;
      for (int64_t j = begin; j < end; ++j) {
        largest = std::max(largest, std::abs(static_cast<double>(x[j])));
      }
      const double scale = ScaleOf(row, inputs, i);
      ASSERT_LE(scale, std::max(largest / 127 * (1 + 0x1p-7), 0x1p-126));
      ASSERT_EQ(wide[i], row[i] * scale) << "the product is exact";
      // x / scale is rounded to f32 before it is rounded to an integer, so the
      // error can be slightly more than half a step.
      ASSERT_LE(std::abs(x[i] - row[i] * scale),
                scale * (0.5 + 128 * std::numeric_limits<float>::epsilon()))
          << "input " << i << " of " << inputs;
    }
  }
};

TEST_P(Int8RowsTest, AWeightIsOffByAtMostHalfAStep) {
  for (const int64_t inputs : kLengths) {
    EXPECT_EQ(Int8RowInputs(Int8RowBytes(inputs)), inputs);
    ExpectWithinHalfAStep(RandomValues(inputs, 1));
  }
}

TEST_P(Int8RowsTest, HoldsNumbersOfAnySize) {
  const float most = std::numeric_limits<float>::max();
  const float least = std::numeric_limits<float>::denorm_min();
  for (const float size : {0.0F, least, 0x1p-126F, 1e-38F, 1.0F, 1e30F, most}) {
    std::vector<float> x(130, 0.0F);
    x[0] = size;
    x[70] = -size;
    x[71] = size / 3;
    ExpectWithinHalfAStep(x);
    EXPECT_EQ(Widened(Quantized(x), 130)[1], 0);
  }
}

TEST_P(Int8RowsTest, OneLargeWeightCostsOnlyItsGroup) {
  std::vector<float> x = RandomValues(192, 2);
  const std::vector<float> before = Widened(Quantized(x), 192);
  x[100] = 1e6F;
  const std::vector<float> after = Widened(Quantized(x), 192);
  for (int64_t i = 0; i < 192; ++i) {
    if (i / kInt8Group == 1) continue;
    EXPECT_EQ(after[i], before[i]);
  }
  EXPECT_EQ(after[101], 0);
}

TEST_P(Int8RowsTest, RefusesWhatIsNotFinite) {
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(),
                          -std::numeric_limits<float>::quiet_NaN(),
                          std::numeric_limits<float>::infinity(),
                          -std::numeric_limits<float>::infinity()}) {
    for (const size_t place : {0, 15, 63, 64, 99}) {
      std::vector<float> x = RandomValues(100, 3);
      x[place] = bad;
      std::vector<int8_t> row(Int8RowBytes(100));
      EXPECT_FALSE(table_->quantize_row(x.data(), 100, row.data()));
    }
  }
}

TEST_P(Int8RowsTest, WidensARangeOfInputs) {
  const std::vector<int8_t> row = Quantized(RandomValues(200, 4));
  const std::vector<float> whole = Widened(row, 200);
  for (const int64_t begin : {0, 64, 100}) {
    for (const int64_t end : {101, 128, 200}) {
      std::vector<float> part(end - begin);
      table_->widen_int8_row(row.data(), 200, begin, end, part.data());
      EXPECT_EQ(part,
                std::vector<float>(whole.begin() + begin, whole.begin() + end));
    }
  }
}

TEST_P(Int8RowsTest, HasTheBitsOfEveryInstructionSet) {
  for (const int64_t inputs : kLengths) {
    const std::vector<float> x = RandomValues(inputs, 5);
    std::vector<int8_t> row(Int8RowBytes(inputs));
    ASSERT_TRUE(
        KernelsFor(Isa::kBaseline)->quantize_row(x.data(), inputs, row.data()));
    EXPECT_EQ(Quantized(x), row);
  }
}

// A product of `rows` rows of x with `outputs` rows of a weight.
struct Problem {
  int64_t rows, inputs, outputs;
};

// Returns y [B, O]. Outputs outside [begin, end) are zero.
template <typename Kernel, typename Weight>
std::vector<float> Product(const Problem& problem, Kernel kernel,
                           const std::vector<Weight>& weight, int64_t stride,
                           int64_t begin, int64_t end) {
  const std::vector<float> x = RandomValues(problem.rows * problem.inputs, 6);
  const std::vector<float> bias = RandomValues(problem.outputs, 7);
  std::vector<float> y(problem.rows * problem.outputs);
  std::vector<float> memory(kRowProductFloats);
  kernel({.x_BI = x.data(),
          .x_stride = problem.inputs,
          .num_rows = problem.rows,
          .num_inputs = problem.inputs,
          .weight_stride = stride,
          .bias_O = bias.data(),
          .y_BO = y.data(),
          .y_stride = problem.outputs,
          .begin = begin,
          .end = end,
          .memory = memory.data()},
         weight.data());
  return y;
}

// The 8-bit product has the bits of the f32 product. So it has the property
// that row_product_test.cc checks for f32: no element depends on other rows
// or on the range.
TEST_P(Int8RowsTest, AProductHasTheBitsOfTheProductWithTheWidenedWeight) {
  for (const int64_t rows : {1, 2, 5, 6, 7, 13, 32, 33, 100}) {
    for (const int64_t inputs : kLengths) {
      for (const int64_t outputs : {1, 4, 7, 12, 19}) {
        const Problem problem{rows, inputs, outputs};
        // The gap between rows reveals a wrong stride.
        const int64_t stride = Int8RowBytes(inputs) + 3;
        std::vector<int8_t> weight(outputs * stride);
        std::vector<float> wide;
        for (int64_t o = 0; o < outputs; ++o) {
          const auto row = Quantized(RandomValues(inputs, 10 + o));
          std::ranges::copy(row, weight.begin() + o * stride);
          const std::vector<float> wide_row = Widened(row, inputs);
          wide.insert(wide.end(), wide_row.begin(), wide_row.end());
        }
        for (const int64_t begin : {int64_t{0}, outputs / 2}) {
          ASSERT_EQ(Product(problem, table_->row_product_int8, weight, stride,
                            begin, outputs),
                    Product(problem, table_->row_product_f32, wide, inputs,
                            begin, outputs))
              << rows << " x " << inputs << " x " << outputs;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryInstructionSet, Int8RowsTest, kEveryIsa,
                         CaseOfIsa);

}  // namespace
}  // namespace weft::kernels::cpu::int8_rows_test
