// Compares widened 8-bit weights, and their products with few rows, with f64
// loops over the stored bytes.
#include "kernels/cuda/int8_weight.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/cpu/int8_rows.h"
#include "tests/kernels/cuda/device_array.h"

namespace weft::kernels::cuda {
namespace {

using cpu::Int8RowBytes;
using cpu::Int8RowStride;
using cpu::kInt8Group;

// A weight of random integers and scales. Bytes behind the rows are random.
struct Weight {
  Weight(int64_t num_outputs, int64_t num_inputs)
      : outputs(num_outputs),
        inputs(num_inputs),
        stride(Int8RowStride(inputs)),
        bytes(static_cast<size_t>(outputs * stride)) {
    std::mt19937 generator(3);
    std::uniform_int_distribution<int> integer(-127, 127);
    std::uniform_real_distribution<float> scale(0.001F, 0.02F);
    for (int64_t o = 0; o < outputs; ++o) {
      int8_t* row = bytes.data() + o * stride;
      for (int64_t i = 0; i < stride; ++i) {
        row[i] = static_cast<int8_t>(integer(generator));
      }
      for (int64_t i = inputs; i < Int8RowBytes(inputs); i += 2) {
        const uint16_t bits = ToBf16(scale(generator));
        row[i] = static_cast<int8_t>(bits & 0xFF);
        row[i + 1] = static_cast<int8_t>(bits >> 8);
      }
    }
  }

  // Returns one weight, which f32 holds exactly.
  float At(int64_t output, int64_t input) const {
    const int8_t* row = bytes.data() + output * stride;
    const int8_t* scale = row + inputs + input / kInt8Group * 2;
    const auto bits = static_cast<uint16_t>(
        static_cast<uint8_t>(scale[0]) | static_cast<uint8_t>(scale[1]) << 8);
    return static_cast<float>(row[input]) * FromBf16(bits);
  }
  Int8Weight On(const DeviceBuffer<int8_t>& buffer) const {
    return {.outputs = outputs,
            .inputs = inputs,
            .rows_OB = buffer.data(),
            .stride = stride};
  }

  int64_t outputs, inputs, stride;
  std::vector<int8_t> bytes;
};

// Weights whose rows are whole chunks, then weights whose last chunk reaches
// into the scales.
std::vector<Weight> Weights() {
  return {Weight(35, 512), Weight(17, 528), Weight(3, 48),  Weight(33, 2624),
          Weight(40, 0),   Weight(19, 576), Weight(21, 72), Weight(5, 136),
          Weight(18, 360), Weight(1, 8)};
}

// Returns the weight with rows at other addresses than multiples of 16 bytes,
// and with a number of inputs that is not a multiple of 8.
std::vector<Int8Weight> RefusedWeights(const Int8Weight& weight) {
  std::vector<Int8Weight> refused(3, weight);
  refused[0].rows_OB += 2;
  refused[1].stride = Int8RowBytes(weight.inputs);
  refused[2].inputs -= 4;
  return refused;
}

class WidenInt8Test : public CudaDtypeTest {};

TEST_P(WidenInt8Test, GivesTheNumbersRoundedOnce) {
  for (const Weight& weight : Weights()) {
    SCOPED_TRACE(weight.inputs);
    const DeviceBuffer<int8_t> stored(weight.bytes);
    for (int64_t begin = 0; begin <= weight.inputs && begin <= kInt8Group;
         begin += kInt8Group) {
      for (const int64_t count :
           {weight.inputs - begin, int64_t{32}, int64_t{8}}) {
        if (begin + count > weight.inputs) continue;
        // The extra 7 at the end reveals a write behind the last number.
        const DeviceArray wide(
            GetParam(),
            std::vector<float>(static_cast<size_t>(weight.outputs * count + 1),
                               7));
        ASSERT_EQ(WidenInt8Rows(weight.On(stored), begin, begin + count,
                                GetParam(), wide.data(), nullptr),
                  cudaSuccess);
        std::vector<float> expected;
        for (int64_t o = 0; o < weight.outputs; ++o) {
          for (int64_t i = 0; i < count; ++i) {
            expected.push_back(weight.At(o, begin + i));
          }
        }
        expected.push_back(7);
        EXPECT_EQ(wide.Read(), Rounded(GetParam(), expected));
      }
    }
  }
}

TEST_P(WidenInt8Test, RefusesWhatItDoesNotTake) {
  const Weight weight(2, 128);
  const DeviceBuffer<int8_t> stored(weight.bytes);
  const DeviceArray wide(GetParam(), std::vector<float>(256));
  const auto widen = [&](const Int8Weight& of, int64_t begin, int64_t end) {
    return WidenInt8Rows(of, begin, end, GetParam(), wide.data(), nullptr);
  };
  EXPECT_EQ(widen(weight.On(stored), 0, 128), cudaSuccess);
  EXPECT_EQ(widen(weight.On(stored), 1, 128), cudaErrorInvalidValue);
  EXPECT_EQ(widen(weight.On(stored), 64, 70), cudaErrorInvalidValue);
  for (const Int8Weight& refused : RefusedWeights(weight.On(stored))) {
    EXPECT_EQ(widen(refused, 0, 64), cudaErrorInvalidValue);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryDtype, WidenInt8Test,
                         ::testing::Values(DType::kF32, DType::kBf16),
                         DTypeName);

// The product of random rows x with a weight. The rows of x and y have margins
// behind the inputs and outputs. The margins of x are NaN.
struct Product {
  static constexpr int64_t kMargin = 3;

  Product(const Weight& of, int64_t rows, DType dtype, bool has_bias)
      : weight(of),
        num_rows(rows),
        y_dtype(dtype),
        with_bias(has_bias),
        x_stride(of.inputs + 8),
        x(Rounded(DType::kBf16, RandomFloats(rows * of.inputs, 5))),
        bias(Rounded(DType::kBf16, RandomFloats(of.outputs, 6))) {}

  int64_t y_stride() const { return weight.outputs + kMargin; }
  std::vector<float> WideX() const {
    std::vector<float> wide(static_cast<size_t>(num_rows * x_stride), kNan);
    for (int64_t m = 0; m < num_rows; ++m) {
      std::copy_n(x.begin() + m * weight.inputs, weight.inputs,
                  wide.begin() + m * x_stride);
    }
    return wide;
  }
  // Fills y with 7, computes the product and returns y with its margins.
  std::vector<float> Run() const {
    const DeviceBuffer<int8_t> stored(weight.bytes);
    const DeviceArray rows(DType::kBf16, WideX()), add(DType::kBf16, bias);
    const DeviceArray y(
        y_dtype,
        std::vector<float>(static_cast<size_t>(num_rows * y_stride()), 7));
    EXPECT_EQ(Int8FewRows({.num_rows = num_rows,
                           .weight = weight.On(stored),
                           .x_MI = rows.data(),
                           .x_stride = x_stride,
                           .bias_O = with_bias ? add.data() : nullptr,
                           .y_dtype = y_dtype,
                           .y_MO = y.data(),
                           .y_stride = y_stride()},
                          nullptr),
              cudaSuccess);
    return y.Read();
  }
  void Expect(const std::vector<float>& y) const {
    for (int64_t m = 0; m < num_rows; ++m) {
      for (int64_t o = 0; o < y_stride(); ++o) {
        const float actual = y[static_cast<size_t>(m * y_stride() + o)];
        if (o >= weight.outputs) {
          ASSERT_EQ(actual, 7) << "behind row " << m;
          continue;
        }
        double sum = with_bias ? bias[static_cast<size_t>(o)] : 0;
        double largest = std::abs(sum);
        for (int64_t i = 0; i < weight.inputs; ++i) {
          sum += static_cast<double>(weight.At(o, i)) *
                 x[static_cast<size_t>(m * weight.inputs + i)];
          largest = std::max(largest, std::abs(sum));
        }
        ASSERT_NEAR(
            actual, sum,
            StoredTolerance(EpsilonOf(y_dtype), weight.inputs, largest, sum))
            << "row " << m << ", output " << o;
      }
    }
  }

  const Weight& weight;
  int64_t num_rows;
  DType y_dtype;
  bool with_bias;
  int64_t x_stride;
  std::vector<float> x, bias;
};

class Int8FewRowsTest : public CudaKernelTest {};

TEST_F(Int8FewRowsTest, IsTheProductOfTheNumbers) {
  bool is_odd = false;
  for (const Weight& weight : Weights()) {
    for (const int64_t rows : {1, 3, 8, 16, 17, 33, 64}) {
      SCOPED_TRACE(::testing::Message()
                   << rows << " rows of " << weight.inputs << " inputs");
      is_odd = !is_odd;
      const Product product(weight, rows, is_odd ? DType::kBf16 : DType::kF32,
                            /*has_bias=*/rows % 2 == 1);
      product.Expect(product.Run());
    }
  }
}

TEST_F(Int8FewRowsTest, ARowHasTheSameBitsInEveryBatch) {
  for (const Weight& weight : {Weight(20, 2624), Weight(20, 136)}) {
    const std::vector<float> all =
        Product(weight, kMaxInt8FewRows, DType::kF32, true).Run();
    for (const int64_t rows : {1, 8, 9, 17, 33}) {
      const Product few(weight, rows, DType::kF32, true);
      EXPECT_EQ(few.Run(), Slice(all, 0, rows * few.y_stride())) << rows;
    }
  }
}

TEST_F(Int8FewRowsTest, ANanStaysInItsRow) {
  for (const Weight& weight : {Weight(20, 512), Weight(20, 136)}) {
    Product product(weight, 20, DType::kF32, false);
    const std::vector<float> before = product.Run();
    const int64_t stride = product.y_stride();
    product.x[static_cast<size_t>(10 * weight.inputs + 100)] = kNan;
    const std::vector<float> after = product.Run();
    for (int64_t o = 0; o < weight.outputs; ++o) {
      EXPECT_TRUE(std::isnan(after[static_cast<size_t>(10 * stride + o)]));
    }
    EXPECT_EQ(Slice(after, 0, 10 * stride), Slice(before, 0, 10 * stride));
    EXPECT_EQ(Slice(after, 11 * stride, 9 * stride),
              Slice(before, 11 * stride, 9 * stride));
  }
}

TEST_F(Int8FewRowsTest, RefusesWhatItDoesNotTake) {
  EXPECT_EQ(Int8FewRows({.num_rows = kMaxInt8FewRows + 1}, nullptr),
            cudaErrorInvalidValue);
  EXPECT_EQ(
      Int8FewRows({.num_rows = 1, .weight = {.stride = kMaxInt8Stride + 16}},
                  nullptr),
      cudaErrorInvalidValue);
  EXPECT_EQ(
      Int8FewRows({.num_rows = 1, .x_stride = kMaxInt8Stride + 8}, nullptr),
      cudaErrorInvalidValue);
  const Weight weight(2, 128);
  const DeviceBuffer<int8_t> stored(weight.bytes);
  for (const Int8Weight& refused : RefusedWeights(weight.On(stored))) {
    EXPECT_EQ(Int8FewRows({.num_rows = 1, .weight = refused}, nullptr),
              cudaErrorInvalidValue);
  }
  EXPECT_EQ(
      Int8FewRows({.num_rows = 1, .weight = weight.On(stored), .x_stride = 132},
                  nullptr),
      cudaErrorInvalidValue);
  // Without rows or outputs there is nothing to do.
  EXPECT_EQ(Int8FewRows({.num_rows = 0, .weight = {.outputs = 3}}, nullptr),
            cudaSuccess);
  EXPECT_EQ(Int8FewRows({.num_rows = 3}, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace weft::kernels::cuda
